"""`python -m tiny_vllm.bench.kernels`: counts by hand, selection, errors, reports, exit status.

The ops themselves run once, tiny, under Triton's interpreter in a process of its own.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from tiny_vllm.bench import kernel_run, kernels
from tiny_vllm.bench.kernel_cases import (
    FULL,
    OPS,
    TINY,
    TINY_CONFIG,
    Case,
    Traffic,
    make_cases,
    select_ops,
)
from tiny_vllm.bench.kernel_forest import block_tables
from tiny_vllm.bench.kernel_report import (
    CHART,
    MANIFEST,
    RESULTS,
    beside,
    cells,
    draw_chart,
    notes,
    open_folder,
    print_results,
    result_row,
)
from tiny_vllm.bench.kernel_timing import (
    MAX_CALLS,
    MAX_COPIES,
    MAX_QUEUED,
    ROTATED_BYTES,
    Built,
    Place,
    Stopwatch,
    fault,
    num_calls,
    num_copies,
)
from tiny_vllm.errors import ConfigError
from tiny_vllm.hub import LLAMA_3_2_1B
from tiny_vllm.metrics import Peaks
from tiny_vllm.models.registry import parse_model_config

LLAMA = parse_model_config(LLAMA_3_2_1B)
PEAKS = Peaks(bandwidth=4e12, flops=8e14, cache_bytes=60 << 20)
CASE = Case("norm_linear", "4 rows", 4, 12_000_000, 24_000_000)
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def work(op, rows=None, label=None):
    (case,) = (
        c for c in make_cases(LLAMA, "bfloat16", FULL, [op]) if c.rows == rows or c.label == label
    )
    return case.num_bytes, case.flops


class TestWork:
    @pytest.mark.parametrize(
        ("op", "rows", "num_bytes", "flops"),
        [
            ("rms_norm", 2, 5 * 2048 * 2, 4 * 2 * 2048),
            ("silu_mul", 2, 3 * 2 * 8192 * 2, 5 * 2 * 8192),
            ("rotary_store", 4, 4 * (2 * 3072 + 2 * 64) * 2, 3 * 4 * 2560),
            ("norm_linear", 1, (3072 * 2048 + 2048 + 3072) * 2, 2 * 3072 * 2048),
            ("norm_gated", 2, (16384 * 2048 + 2 * 2048 + 2 * 8192) * 2, 4 * 16384 * 2048),
            ("linear_add_out", 1, (2048 * 2048 + 3 * 2048) * 2, 2 * 2048 * 2048),
            ("linear_add_down", 1, (2048 * 8192 + 8192 + 2 * 2048) * 2, 2 * 2048 * 8192),
            ("norm_lm_head", 1, (128256 + 1) * 2048 * 2 + 128256 * 4, 2 * 128256 * 2048),
            ("greedy", 32, 32 * 128256 * 4, 32 * 128256),
        ],
    )
    def test_of_ops(self, op, rows, num_bytes, flops):
        assert work(op, rows) == (num_bytes, flops)

    def test_of_a_shared_prefix_counts_it_once(self):
        """2 KiB a token of K and V in one layer."""
        num_bytes, flops = work("decode_attention", label="32 x 8k + 256")
        assert num_bytes == (8192 + 32 * 256) * 2048
        assert flops == 4 * 32 * 64 * 32 * (8192 + 256)

    def test_of_a_forest_counts_each_document_once(self):
        num_bytes, flops = work("decode_attention", label="8 x 16 on 1k + 8k + 256")
        assert num_bytes == (1024 + 8 * 8192 + 128 * 256) * 2048
        assert flops == 4 * 32 * 64 * 128 * (1024 + 8192 + 256)

    def test_of_a_causal_chunk(self):
        num_bytes, flops = work("prefill_attention", label="2k tokens")
        assert num_bytes == 2048 * (32 + 8 + 8 + 32) * 64 * 2
        assert flops == 4 * 32 * 64 * sum(range(1, 2049))

    def test_float32_doubles_the_bytes_of_a_model_but_not_of_logits(self):
        for op, factor in (("norm_linear", 2), ("gumbel", 1)):
            short, wide = (make_cases(LLAMA, d, FULL, [op])[0] for d in ("bfloat16", "float32"))
            assert wide.num_bytes == factor * short.num_bytes
            assert wide.flops == short.flops


class TestSelection:
    def test_all_ops_have_cases_of_both_sizes(self):
        for sizes in (FULL, TINY):
            cases = make_cases(TINY_CONFIG, "float32", sizes, OPS)
            assert list(dict.fromkeys(case.op for case in cases)) == list(OPS)
            names = [case.name for case in cases]
            assert len(set(names)) == len(names)
            assert all(case.num_bytes > 0 and case.flops > 0 for case in cases)

    def test_by_name_or_part_of_it_in_the_usual_order(self):
        assert select_ops([]) == tuple(OPS)
        assert select_ops(["greedy", "attention"]) == (
            *("greedy", "decode_attention", "prefill_attention"),
        )

    def test_an_unknown_op_names_the_nearest(self):
        with pytest.raises(ConfigError, match="did you mean 'greedy'"):
            select_ops(["gredy"])

    def test_builders_exist(self):
        for op in OPS.values():
            module, _, function = op.builder.partition(":")
            assert callable(getattr(importlib.import_module(module), function))


class TestTiming:
    def test_copies_exceed_the_cache_or_are_many(self):
        assert num_copies(600 << 20) == 1
        assert num_copies(ROTATED_BYTES // 5 - 1) == 6
        assert num_copies(100) == MAX_COPIES

    def test_calls_fill_the_target_with_whole_rotations(self):
        assert num_calls(copies=6, guess_s=1e-4, once_s=1e-4) == 12
        assert num_calls(copies=20, guess_s=1e-3, once_s=1e-3) == 20
        assert num_calls(copies=1, guess_s=1e-7, once_s=1e-5) == MAX_CALLS
        assert num_calls(copies=20, guess_s=1e-3, once_s=1e-3, captures=False) == MAX_QUEUED

    def test_slow_calls_are_few(self):
        assert num_calls(copies=16, guess_s=1e-4, once_s=0.01) == 4
        assert num_calls(copies=16, guess_s=1e-4, once_s=3.0) == 1

    def test_a_stopwatch_warms_up_and_rotates(self):
        seen = []
        seconds = Stopwatch(torch.device("cpu"), 5).seconds(seen.append, 2, 1e-6)
        assert seen == [0, 0, 1, 0, 1, 0]
        assert seconds >= 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_a_fault_is_more_than_rounding(self, dtype):
        want = torch.randn(40, 50)
        assert fault(want.to(dtype), want, dtype) is None
        wrong = want.clone()
        wrong[7, 7] += 0.3
        assert "off by" in (fault(wrong.to(dtype), want, dtype) or "")
        wrong[7, 7] = torch.nan
        assert fault(wrong.to(dtype), want, dtype) == "the result is not finite"


def test_block_tables_share_what_is_shared():
    table = block_tables(Traffic(2, 2, common=32, prefix=48, own=20), 16)
    assert table.dtype == np.int32
    assert table.tolist() == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 7, 8],
        [0, 1, 9, 10, 11, 12, 13],
        [0, 1, 9, 10, 11, 14, 15],
    ]


def results(*rows, **changes):
    values = {"model": "m", "dtype": "bfloat16", "device_name": "a GPU", "notes": []}
    values |= {"peaks": {"bandwidth": 4e12, "flops": 8e14}, "cases": list(rows)}
    return {**values, **changes}


class TestReport:
    def test_rates_and_share_by_hand(self):
        """12 MB at 4 TB/s take 3 us at least; 6 us were taken."""
        row = result_row(
            CASE, PEAKS, seconds=6e-6, references={"cuBLAS": 9e-6, "other": None}, copies=22
        )
        assert row["us"] == pytest.approx(6)
        assert row["tb_s"] == pytest.approx(2)
        assert row["tflop_s"] == pytest.approx(4)
        assert row["share"] == pytest.approx(0.5)
        assert (row["bound"], row["cached"], row["status"]) == ("memory", False, "ok")
        assert row["gain"] == pytest.approx(1.5)
        assert row["references_us"] == {"cuBLAS": pytest.approx(9), "other": None}
        assert beside(row) == "cuBLAS 9.0, other N/A"

    def test_the_gain_is_over_the_fastest(self):
        row = result_row(CASE, PEAKS, seconds=6e-6, references={"a": 9e-6, "b": 3e-6})
        assert row["gain"] == pytest.approx(0.5)

    def test_bound_by_flops(self):
        case = Case("prefill_attention", "8k tokens", 8192, 4_000_000, 8 * 10**11)
        row = result_row(case, PEAKS, seconds=2e-3)
        assert (row["bound"], row["share"]) == ("compute", pytest.approx(0.5))

    def test_what_fits_the_cache_is_marked(self):
        row = result_row(CASE, PEAKS, seconds=6e-6, copies=2)
        assert row["cached"]
        assert "50.0 %* memory" in cells(row)
        assert any(line.startswith("* ") for line in notes(results(row)))

    def test_without_peaks_there_is_no_share(self):
        row = result_row(CASE, None, seconds=6e-6)
        assert row["share"] is None
        assert cells(row)[7] == "N/A"

    def test_a_failure_is_printed(self, tmp_path):
        row = result_row(CASE, PEAKS, error="off by 3")
        console = Console(file=open(tmp_path / "out", "w"))  # noqa: SIM115
        print_results(results(row, result_row(CASE, PEAKS, seconds=1e-5)), console)
        console.file.close()
        text = (tmp_path / "out").read_text()
        assert "FAILED norm_linear 4 rows: off by 3" in text
        assert "measured peaks: 4.00 TB/s read, 800 TFLOP/s" in text
        assert len(cells(row)) == 10

    def test_the_chart(self, tmp_path):
        pytest.importorskip("matplotlib")
        rows = [result_row(CASE, PEAKS, seconds=s * 1e-6) for s in (4, 2)]
        for number, chosen in enumerate((rows, [], [result_row(CASE, PEAKS, error="e")])):
            path = tmp_path / f"{number}.png"
            draw_chart(results(*chosen), path)
            assert path.read_bytes().startswith(b"\x89PNG")

    def test_a_folder_with_results_is_not_overwritten_unasked(self, tmp_path):
        open_folder(tmp_path / "a", {"status": "running"}, force=False)
        (tmp_path / "a" / RESULTS).write_text("{}")
        with pytest.raises(ConfigError, match="--force"):
            open_folder(tmp_path / "a", {}, force=False)
        open_folder(tmp_path / "a", {"status": "again"}, force=True)
        assert not (tmp_path / "a" / RESULTS).exists()
        assert json.loads((tmp_path / "a" / MANIFEST).read_text()) == {"status": "again"}

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot be written"):
            open_folder(tmp_path / "file" / "a", {}, force=False)


class TestRunCase:
    @pytest.fixture
    def run(self, monkeypatch):
        """Runs a case whose op is ``built``, or raises it."""

        def build(case, place):
            if isinstance(built, Exception):
                raise built
            return built

        built = None

        def run(value, messages=None):
            nonlocal built
            built = value
            device = torch.device("cpu")
            place = Place(TINY_CONFIG, torch.float32, device)
            watch, messages = Stopwatch(device, 1), [] if messages is None else messages
            return kernel_run._run_case(CASE, place, watch, PEAKS, messages)

        monkeypatch.setattr(kernel_run, "_build", build)
        return run

    def test_a_right_one_is_timed(self, run):
        row = run(Built(lambda i: i, {"torch": lambda i: i}, lambda: None, facts={"plan_us": 3.0}))
        assert row["status"] == "ok"
        assert row["us"] > 0 and row["references_us"]["torch"] > 0
        assert row["plan_us"] == 3.0

    def test_a_wrong_one_is_not_timed(self, run):
        def kernel(i):
            raise AssertionError("timed")

        row = run(Built(kernel, {}, lambda: "off by 3"))
        assert (row["status"], row["error"], row["us"]) == ("failed", "off by 3", None)

    def test_one_that_does_not_compile_fails_alone(self, run):
        row = run(ValueError("no\nmore"))
        assert (row["status"], row["error"]) == ("failed", "ValueError: no")

    def test_a_reference_that_is_missing_is_a_note(self, run):
        def missing(i):
            raise RuntimeError("No available kernel")

        messages = []
        row = run(Built(lambda i: i, {"flash": missing}, lambda: None), messages)
        assert row["status"] == "ok"
        assert row["references_us"] == {"flash": None}
        assert row["gain"] is None
        assert messages == [
            "norm_linear 4 rows: flash did not run: RuntimeError: No available kernel"
        ]


class TestCommand:
    def test_list_needs_no_gpu(self, capsys):
        assert kernels.main(["--list", "--only", "norm_lm_head"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "norm_lm_head: norm + logits in float32"
        assert lines[1].split() == ["1", "row", "525.854", "MB", "0.525", "GFLOP"]
        assert len(lines) == 6

    @needs_triton
    @pytest.mark.parametrize("arguments", [[], ["--device", "cpu"], ["--tiny"]])
    def test_without_a_gpu_it_says_so(self, arguments, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.chdir(tmp_path)
        assert kernels.main(arguments) == 2
        captured = capsys.readouterr()
        assert "the kernels run on a GPU only" in captured.err
        assert captured.out == ""
        assert list(tmp_path.iterdir()) == []

    @needs_triton
    def test_a_device_that_is_not_there(self, capsys, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert kernels.main(["--device", "cuda:2"]) == 2
        assert "this machine has 2 CUDA device(s)" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--only", "nothing"], "--only='nothing' is not one of"),
            (["--model", "llama-3.2-2b", "--list"], "did you mean 'llama-3.2-1b'"),
        ],
    )
    def test_wrong_values(self, arguments, message, capsys):
        assert kernels.main(arguments) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--dtype", "int8"], ["--what"]])
    def test_wrong_options(self, arguments, capsys):
        with pytest.raises(SystemExit) as stopped:
            kernels.main(arguments)
        assert stopped.value.code == 2

    @pytest.mark.parametrize(("error", "status"), [(None, 0), ("off by 3", 1)])
    @needs_triton
    def test_exit_status_folder_and_last_line(self, error, status, capsys, monkeypatch, tmp_path):
        def run_cases(config, cases, results, **options):
            seconds = None if error else 6e-6
            results["cases"].append(result_row(CASE, None, seconds=seconds, error=error))

        monkeypatch.setattr(kernel_run, "run_cases", run_cases)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        out = tmp_path / "run"
        command = ["--tiny", "--device", "cpu", "--out", str(out)]
        assert kernels.main(command) == status
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        kept = json.loads((out / RESULTS).read_text())
        assert last["failed"] == kept["failed"] == status
        assert last["cases"] == kept["cases"]
        assert json.loads((out / MANIFEST).read_text())["status"] == "complete"
        assert kernels.main(command) == 2  # the folder is taken

    @needs_triton
    def test_an_interrupted_run_keeps_what_it_has(self, monkeypatch, tmp_path):
        def run_cases(config, cases, results, **options):
            results["cases"].append(result_row(CASE, None, seconds=6e-6))
            raise KeyboardInterrupt

        monkeypatch.setattr(kernel_run, "run_cases", run_cases)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert kernels.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)]) == 130
        assert json.loads((tmp_path / MANIFEST).read_text())["status"] == "interrupted"
        assert len(json.loads((tmp_path / RESULTS).read_text())["cases"]) == 1


@needs_triton
@pytest.mark.slow
def test_the_ops_under_the_interpreter(tmp_path):
    """Every builder but the slowest; forests plan to read unique tokens once."""
    names = "rms_norm silu_mul rotary linear_add_out norm_linear greedy gumbel attention".split()
    command = [sys.executable, "-m", "tiny_vllm.bench.kernels", "--tiny", "--device", "cpu"]
    command += ["--dtype", "float32", "--repeats", "1", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, *(part for name in names for part in ("--only", name))],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(kernels.__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert {row["op"] for row in last["cases"]} == set(select_ops(names))
    assert all(row["us"] > 0 for row in last["cases"])
    forests = [row for row in last["cases"] if row["op"] == "decode_attention"]
    assert forests
    for row in forests:
        assert row["planned_bytes"] == row["bytes"] < row["per_request_bytes"]
        assert row["references_us"]["per request"] > 0
    assert {p.name for p in (tmp_path / "run").iterdir()} - {CHART} == {RESULTS, MANIFEST}
