"""`tiny-vllm bench` as a command: flags, the last line, and exit status 2 for bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_vllm.bench import session
from tiny_vllm.bench.session import BenchOptions, BenchResult, ModelShape
from tiny_vllm.cli import bench as command
from tiny_vllm.cli.main import main

Captured = list[BenchOptions]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Captured:
    """The options that reach the benchmark; nothing is run."""
    seen: Captured = []

    def run(options: BenchOptions, shape: ModelShape, encoder: Callable[[], Any]) -> BenchResult:
        seen.append(options)
        return BenchResult({"schema": "x", "n": 1}, tmp_path, 0)

    monkeypatch.setattr(session, "run_bench", run)
    monkeypatch.setattr(command, "model_shape", lambda _: ModelShape(1000, 512))
    monkeypatch.setattr("tiny_vllm.bench.table.print_summary", lambda summary: print("table"))
    return seen


def test_defaults(captured: Captured) -> None:
    assert main(["bench"]) == 0
    (options,) = captured
    assert (options.workload, options.model, options.repeats) == ("demo", "smollm2-135m", 1)
    assert [v.name for v in options.variants] == ["origin", "extended"]


def test_the_last_line_is_the_summary(
    captured: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["bench"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"schema": "x", "n": 1}


def test_flags_reach_the_benchmark(captured: Captured, tmp_path: Path) -> None:
    arguments = "bench --workload single --variants extended --variants small=block_size:16 "
    arguments += "--model llama-3.2-1b --load-format dummy --dtype float32 --device cpu "
    arguments += "--repeats 3 --seed 5 --scale 0.5 --quiet --arrivals all --block-size 64 "
    arguments += "--max-num-seqs 8 --max-num-batched-tokens 256 --threads 1 --max-new-tokens 7 "
    assert main([*arguments.split(), "--out", str(tmp_path)]) == 0
    (options,) = captured
    assert options.engine == {
        "model": "llama-3.2-1b",
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "block_size": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_threads": 1,
    }
    assert (options.workload, options.repeats, options.seed) == ("single", 3, 5)
    assert (options.scale, options.quiet, options.arrivals) == (0.5, True, "all")
    assert options.out == tmp_path
    assert options.switches.max_new_tokens_generated == 7
    assert [v.name for v in options.variants] == ["extended", "small"]


def test_switches_are_defaults_and_flags_win(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_SIZE", "2")
    monkeypatch.setenv("BLOCK_SIZE", "128")
    monkeypatch.setenv("USE_PREFIX_CACHE", "0")
    monkeypatch.setenv("MAX_NEW_TOKENS_GENERATED", "9")
    main(["bench", "--block-size", "16", "--max-new-tokens", "0"])
    (options,) = captured
    assert options.engine == {
        "max_num_seqs": 2,
        "block_size": 16,
        "enable_prefix_caching": False,
    }
    assert options.switches.block_size == 16
    assert options.switches.max_new_tokens_generated == 0


def test_two_names_of_the_thread_count_are_one_flag(captured: Captured) -> None:
    """--threads silently won over --num-threads; now the last one given does, as for any flag."""
    main(["bench", "--threads", "3", "--num-threads", "2"])
    assert captured[0].engine == {"num_threads": 2}


def test_results_are_kept_before_anything_is_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "summary.json").write_text("{}")
    options = ["--model", "llama-3.2-1b", "--load-format", "dummy", "--workload", "single"]
    assert main(["bench", *options, "--out", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "summary.json").read_text() == "{}"


def test_a_failed_variant_is_the_exit_status(
    captured: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "run_bench", lambda *_: BenchResult({}, tmp_path, 1))
    assert main(["bench"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "shaerd-4x1k"], "unknown workload 'shaerd-4x1k'"),
        (["--workload", "sinlge"], "did you mean 'single'"),
        (["--workload", "traces/gone.jsonl"], "workload 'traces/gone.jsonl': no such trace file"),
        (["--workload", "gone.jsonl"], "workload 'gone.jsonl': no such trace file"),
        (["--workload", "/"], "workload '/': is a folder"),
        (["--variants", "x=reasons:3"], "variant 'x': unknown EngineConfig key 'reasons'"),
        (["--workload", "prefill-1x8k", "--max-model-len", "9"], "no request of prefill-1x8k can"),
        (["--model", "zzz"], "unknown model 'zzz': give a folder"),
        (["--variants", "extendd"], "unknown variant 'extendd'; did you mean 'extended'"),
        (["--variants", "x=blok_size:3"], "variant 'x': unknown EngineConfig key 'blok_size'"),
        (["--model", "smolm2-135m"], "unknown model 'smolm2-135m'"),
        (["--scale", "2"], "scale=2.0"),
        (["--arrivals", "now"], "arrivals='now' is not one of all, recorded"),
        (["--workload", "single", "--arrivals", "recorded"], "has a field 'arrival'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = [] if "--model" in arguments else ["--model", "llama-3.2-1b", "--load-format", "dummy"]
    assert main(["bench", *model, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_bad_trace_line_names_file_line_and_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"prompt_token_ids": [1], "max_tokens": 1}\n'
        '{"prompt_token_ids": [999999], "max_tokens": 1}\n'
    )
    options = ["--model", "llama-3.2-1b", "--load-format", "dummy", "--workload", str(trace)]
    assert main(["bench", *options]) == 2
    assert f"{trace}, line 2: field 'prompt_token_ids' holds the id 999999" in (
        capsys.readouterr().err
    )


def test_a_switch_that_cannot_be_parsed_is_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCK_SIZE", "many")
    assert main(["bench"]) == 2
    assert "BLOCK_SIZE='many'" in capsys.readouterr().err


def test_an_out_folder_that_cannot_be_made_is_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    options = ["--model", "llama-3.2-1b", "--load-format", "dummy", "--workload", "single"]
    assert main(["bench", *options, "--out", str(tmp_path / "file" / "run")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_text_without_a_tokenizer_is_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--model", "llama-3.2-1b", "--load-format", "dummy", "--out", str(tmp_path / "run")]
    assert main(["bench", *options, "--workload", "demo"]) == 2
    assert "without a tokenizer" in capsys.readouterr().err
