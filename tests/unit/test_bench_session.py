"""Whole benchmarks over fake engines, in this process: folder, summary, table, plot.

`test_bench_worker.py` runs the same code in real processes.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiny_vllm.bench import limits, session, variants, worker
from tiny_vllm.bench.folder import load_run
from tiny_vllm.bench.plots import draw_comparison
from tiny_vllm.bench.results import first_divergence, median_of, summarize
from tiny_vllm.bench.session import BenchOptions, BenchResult, ModelShape, run_bench
from tiny_vllm.bench.table import print_summary
from tiny_vllm.bench.variants import parse_variants
from tiny_vllm.bench.worker import ChildFailed, Event, RunSpec
from tiny_vllm.env import Switches
from tiny_vllm.errors import ConfigError, TraceError
from tiny_vllm.metrics import Peaks

SHAPE = ModelShape(vocab_size=1000, max_model_len=512)
SLOW_MACHINE = Peaks(bandwidth=1e15, flops=1e15)  # no fake run beats its floor
SPEC_KEYS = """name config requests failed prompt_tokens generated_tokens wall_s prefill_s decode_s
    throughput_tok_s tpot_e2e_ms tpot_decode_ms ttft_ms tpot_ms itl_ms e2el_ms peak_memory_bytes
    peak_memory_kind cache kv_bytes roofline outputs_sha256""".split()
TOP_KEYS = """schema workload model device dtype seed cache_at_start variants speedup
    outputs_match""".split()


class Pipe:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def order() -> list[str]:
    """Factories in the order in which runs were started."""
    return []


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch, order: list[str], tmp_path: Path) -> None:
    def run(target: object, spec: RunSpec, *, on_event: Callable[[Event], None]) -> Any:
        assert target is worker.run_variant
        order.append(spec.factory.partition(":")[2])
        try:
            return worker._measure(Pipe(), spec)  # type: ignore[arg-type]
        except Exception as error:
            raise ChildFailed(type(error).__name__, f"{type(error).__name__}: {error}") from error

    def measure(*_: object, on_event: Callable[[Event], None]) -> tuple[Peaks, bool]:
        return SLOW_MACHINE, False

    monkeypatch.setattr(session, "run_child", run)
    monkeypatch.setattr(limits, "run_child", measure)
    monkeypatch.setitem(variants.FACTORIES, "extended", "bench_fake:FakeEngine")
    monkeypatch.setitem(variants.FACTORIES, "origin", "bench_fake:FakeEngine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def no_encoder() -> Any:
    raise AssertionError("no text here")


def bench(tmp_path: Path, names: str = "origin,extended", **options: Any) -> BenchResult:
    settings = {"workload": "shared-4x1k", "scale": 0.03125, "quiet": True, "force": True}
    settings["out"] = tmp_path / "run"
    made = BenchOptions(**{**settings, "variants": parse_variants([names]), **options})
    return run_bench(made, SHAPE, no_encoder)


def without_cache(tmp_path: Path, **options: Any) -> BenchResult:
    return bench(tmp_path, "plain=enable_prefix_caching:false,extended", **options)


def test_the_summary_has_the_keys_of_the_design(tmp_path: Path) -> None:
    summary = bench(tmp_path).summary
    assert set(TOP_KEYS) <= set(summary)
    for variant in summary["variants"]:
        assert set(SPEC_KEYS) <= set(variant)
        assert set(variant["ttft_ms"]) == {"mean", "p50", "p90", "p99"}
        assert set(variant["cache"]) == {
            "block_hit_rate",
            "token_hit_rate",
            "cached_tokens",
            "computed_tokens",
            "recomputed_tokens",
            "copied_tokens",
            "held_requests",
            "held_steps",
            "missed",
            "unbalanced",
        }
        assert {"floor_s", "mbu", "mfu", "impossible"} <= set(variant["roofline"])
    assert summary["schema"] == "tiny-vllm.bench/1"
    assert summary["speedup"].keys() == summary["outputs_match"].keys() == {"extended/origin"}


def test_numbers_fit_together(tmp_path: Path) -> None:
    """4 requests of 32 + 2 prompt tokens and 8 new ones; 3 of 4 find the common 32."""
    result = without_cache(tmp_path)
    plain, cached = result.summary["variants"]
    assert result.exit_code == 0
    for variant in (plain, cached):
        assert (variant["requests"], variant["failed"]) == (4, 0)
        assert (variant["prompt_tokens"], variant["generated_tokens"]) == (136, 32)
        assert variant["throughput_tok_s"] == pytest.approx(32 / variant["wall_s"])
        assert variant["tpot_e2e_ms"] == pytest.approx(1e3 * variant["wall_s"] / 32)
        assert variant["decoded_tokens"] == 28
        cache = variant["cache"]
        assert cache["cached_tokens"] + cache["computed_tokens"] == variant["prompt_tokens"]
        assert cache["computed_tokens"] == sum(cache["missed"].values()) and not cache["unbalanced"]
        assert variant["kv_bytes"] == {"logical": 16 * 8, "physical": 8 * 8}
    assert plain["cache"]["token_hit_rate"] == 0.0
    assert plain["cache"]["block_hit_rate"] is None
    assert 96 <= cached["cache"]["cached_tokens"] < 102
    assert cached["cache"]["block_hit_rate"] == 0.75  # 6 of 8 blocks of 16
    assert cached["outputs_sha256"] == plain["outputs_sha256"]


def test_warm_up_is_outside_all_counts(tmp_path: Path) -> None:
    """The ledger of the run alone: no warm-up tokens, and a cold cache at the start."""
    bench(tmp_path, "extended", workload="single", scale=0.05)
    (run,) = json.loads((tmp_path / "run/manifest.json").read_text())["runs"]
    assert run["ledger"]["prompt_tokens"] == 51
    assert run["ledger"]["cached_tokens"] == 0
    assert run["warmup_s"] > 0


def test_the_files_alone_give_the_summary(tmp_path: Path) -> None:
    result = bench(tmp_path, repeats=2)
    stored = json.loads((tmp_path / "run/summary.json").read_text())
    assert summarize(load_run(tmp_path / "run")) == stored == result.summary


def test_rows_of_the_run_folder(tmp_path: Path) -> None:
    bench(tmp_path)
    rows = [json.loads(x) for x in (tmp_path / "run/requests.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    row = rows[-1]
    assert (row["variant"], row["repeat"], row["finish_reason"]) == ("extended", 0, "length")
    assert row["first_token"] == row["token_times"][0]
    assert len(row["token_times"]) == row["output_tokens"] == len(row["output_token_ids"]) == 8
    steps = [json.loads(x) for x in (tmp_path / "run/steps.jsonl").read_text().splitlines()]
    assert [s["kind"] for s in steps if s["variant"] == "extended"] == ["prefill"] + ["decode"] * 7
    assert steps[0]["num_prefill_tokens"] > 0
    assert steps[0]["end"] >= steps[0]["start"] >= 0


def test_manifest_says_where_the_run_came_from(tmp_path: Path) -> None:
    bench(tmp_path, seed=7)
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["seed"] == 7
    assert len(manifest["trace_sha256"]) == 64
    assert {"git_sha", "git_dirty", "command", "versions", "created"} <= set(manifest)
    assert manifest["command"] == sys.orig_argv  # not the name of a module and half the words
    assert manifest["runs"][0]["info"]["reasons"]["device"] == "a test"
    assert manifest["runs"][0]["environment"]["device_name"]


def test_repeats_are_interleaved_and_all_kept(tmp_path: Path, order: list[str]) -> None:
    variants.FACTORIES["origin"] = "bench_fake:FlippedEngine"
    summary = bench(tmp_path, repeats=3).summary
    assert order == ["FlippedEngine", "FakeEngine"] * 3
    for variant in summary["variants"]:
        walls = sorted(repeat["wall_s"] for repeat in variant["repeats"])
        assert len(walls) == 3
        assert variant["wall_s"] == walls[1]
        assert variant["outputs_stable"]


def test_a_divergence_is_located_and_never_hidden(tmp_path: Path) -> None:
    variants.FACTORIES["extended"] = "bench_fake:FlippedEngine"
    match = bench(tmp_path).summary["outputs_match"]["extended/origin"]
    assert match == {
        "equal": False,
        "first_divergence": {"request": "0", "position": 2},
        "equal_requests": 0,
        "compared_requests": 4,
        "requests": 4,
    }


def test_a_divergence_in_16_bits_is_explained(tmp_path: Path) -> None:
    """It used to read like a fault of the engine."""
    variants.FACTORIES["extended"] = "bench_fake:FlippedEngine"
    summary = bench(tmp_path).summary
    first = "0 of 4 requests equal; first divergence in request 0 at token 2"
    assert f"outputs extended/origin: {first}\n" in printed(summary)  # float32: no excuse
    for variant in summary["variants"]:
        variant["dtype"] = "bfloat16"
    assert (
        f"{first} (bfloat16: other batch shapes round differently; "
        "--dtype float32 compares exactly)"
    ) in printed(summary)


def test_a_failed_variant_does_not_stop_the_others(tmp_path: Path, order: list[str]) -> None:
    variants.FACTORIES["origin"] = "bench_fake:BrokenEngine"
    result = bench(tmp_path, repeats=2)
    broken, extended = result.summary["variants"]
    assert result.exit_code == 1
    assert broken["error"] == "ArithmeticError: the numbers went wrong"
    assert set(SPEC_KEYS) <= set(broken)
    assert (broken["requests"], broken["failed"], broken["wall_s"]) == (4, 4, None)
    assert extended["generated_tokens"] == 32
    assert result.summary["speedup"] == {}
    assert order.count("BrokenEngine") == 1  # not tried again
    assert json.loads((tmp_path / "run/manifest.json").read_text())["status"] == "failed"


def test_bad_settings_found_by_every_engine_are_bad_input(tmp_path: Path) -> None:
    variants.FACTORIES["origin"] = variants.FACTORIES["extended"] = "bench_fake:RefusingEngine"
    result = bench(tmp_path)
    assert result.exit_code == 2
    assert "is no good" in result.summary["variants"][0]["error"]


def test_ctrl_c_leaves_a_valid_folder_marked_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = session.run_child, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*args, **kwargs)

    monkeypatch.setattr(session, "run_child", interrupted)
    result = bench(tmp_path)
    assert result.exit_code == 130
    assert result.summary["status"] == "interrupted"
    origin, extended = result.summary["variants"]
    assert origin["generated_tokens"] == 32
    assert extended["error"] == "interrupted before it finished"
    assert summarize(load_run(tmp_path / "run")) == result.summary


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_to_end_is_like_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """SIGTERM used to leave the manifest at `running`."""
    number = getattr(signal, name)
    if signal.getsignal(number) is not signal.SIG_DFL:  # nohup ignores SIGHUP, and so does bench
        pytest.skip(f"{name} is not at its default here")

    def ended(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal came to nothing")

    monkeypatch.setattr(session, "run_child", ended)
    assert bench(tmp_path).exit_code == 130
    assert json.loads((tmp_path / "run/manifest.json").read_text())["status"] == "interrupted"
    assert signal.getsignal(number) is signal.SIG_DFL


def test_requests_that_cannot_fit_are_counted_not_lost(tmp_path: Path) -> None:
    """Case 13 for the benchmark: the model takes 512 tokens, two of three requests fit."""
    trace = tmp_path / "t.jsonl"
    rows = [{"prompt_token_ids": [9] * n, "max_tokens": 4} for n in (20, 600, 30)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    result = bench(tmp_path, workload=str(trace), scale=1.0)
    for variant in result.summary["variants"]:
        assert (variant["requests"], variant["failed"]) == (3, 1)
        assert (variant["prompt_tokens"], variant["generated_tokens"]) == (50, 8)
    assert result.exit_code == 0
    warning = result.summary["warnings"][0]  # others may follow: on a busy machine, say
    assert warning.startswith(
        "origin: 1 of 3 requests failed; 1 times: 600 prompt tokens and 4 new ones are 604, "
        "max_model_len=512 holds no more"
    )
    assert load_run(tmp_path / "run").requests[("origin", 0)][1].error
    match = result.summary["outputs_match"]["extended/origin"]
    assert (match["equal"], match["compared_requests"], match["requests"]) == (True, 2, 3)
    text = printed(result.summary)
    assert "outputs extended/origin: equal, token for token (2 of 3 finished requests)" in text
    assert "speedup extended/origin: N/A (the variants did not do the same work)" in text


@pytest.mark.parametrize("variable", ["MAX_SEQ_LEN", "MAX_PROMPT_LEN", "the model"])
def test_a_trace_of_which_nothing_fits_is_refused_before_loading(
    tmp_path: Path, order: list[str], variable: str
) -> None:
    """It used to load both engines, print a table of zeros and say "outputs equal"."""
    options = {
        "MAX_SEQ_LEN": {"engine": {"max_model_len": 20}},
        "MAX_PROMPT_LEN": {"switches": Switches(max_prompt_len=20)},
        "the model": {"workload": "prefill-1x8k", "scale": 1.0},
    }[variable]
    with pytest.raises(ConfigError, match="no request of .* can run: ") as error:
        bench(tmp_path, **options)
    assert "=20 " in str(error.value) or "max_model_len=512" in str(error.value)
    assert order == []
    assert not (tmp_path / "run").exists()


def test_a_run_without_any_good_request_fails(tmp_path: Path) -> None:
    """Nothing finished, so nothing is equal and nothing has a time or a roofline."""
    variants.FACTORIES["origin"] = variants.FACTORIES["extended"] = "bench_fake:PickyEngine"
    result = bench(tmp_path)
    assert result.exit_code == 1
    match = result.summary["outputs_match"]["extended/origin"]
    assert (match["equal"], match["compared_requests"]) == (None, 0)
    for variant in result.summary["variants"]:
        assert variant["failed"] == 4
        assert variant["roofline"]["share"] is variant["roofline"]["impossible"] is None
        numbers = ("wall_s", "prefill_s", "throughput_tok_s", "tpot_e2e_ms", "outputs_sha256")
        assert [variant[name] for name in numbers] == [None] * 5
        assert variant["errors"] == [{"error": "request 0 is not to my taste", "requests": 4}]
    text = printed(result.summary)
    assert "outputs extended/origin: nothing to compare (0 of 4 finished)" in text
    assert "origin: 4 of 4 requests failed; 4 times: request 0 is not to my taste" in text
    assert "equal" not in text


def test_case_20_a_random_workload_with_hits_is_flagged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 20: the fake engine is made to count hits that a random workload cannot have."""
    monkeypatch.setattr("bench_fake._common", lambda left, right: len(left) // 2)
    summary = bench(tmp_path, workload="cold-64x2k", scale=0.01).summary
    assert any("of a random workload came from the cache" in w for w in summary["warnings"])
    assert summary["cache_at_start"] == "cold"


def test_an_impossible_run_is_flagged_not_printed_as_a_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Peaks(bandwidth=1.0, flops=1.0)
    monkeypatch.setattr(limits, "run_child", lambda *_, **__: (slow, False))
    summary = bench(tmp_path).summary
    assert all(v["roofline"]["impossible"] for v in summary["variants"])
    assert any("faster than the physical floor" in w for w in summary["warnings"])
    assert "IMPOSSIBLE" in printed(summary)


def test_peaks_that_a_run_beats_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks taken on a busy machine must not make an honest run impossible for ever."""
    found = iter([Peaks(1.0, 1.0), SLOW_MACHINE])
    monkeypatch.setattr(limits, "run_child", lambda *_, **__: (next(found), False))
    assert not bench(tmp_path).summary["variants"][0]["roofline"]["impossible"]
    assert not bench(tmp_path).summary["variants"][0]["roofline"]["impossible"]  # from the cache


def test_peaks_from_a_busy_machine_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([Peaks(1e13, 1e13), SLOW_MACHINE])
    monkeypatch.setattr(limits, "run_child", lambda *_, **__: (next(found), True))
    assert any("beside other programs" in note for note in bench(tmp_path).summary["notes"])
    bench(tmp_path)  # measures again
    assert next(found, None) is None


def test_without_peaks_the_roofline_is_null_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Peaks:
        raise ChildFailed("Died", "no torch")

    monkeypatch.setattr(limits, "run_child", fail)
    result = bench(tmp_path)
    assert result.summary["variants"][0]["roofline"]["floor_s"] is None
    assert "no roofline" in result.summary["notes"][0]
    assert result.exit_code == 0


def test_lengths_and_slots_are_the_traces_own(tmp_path: Path) -> None:
    config = bench(tmp_path).summary["variants"][0]["config"]
    assert config["max_model_len"] == 64  # 42 rounded up
    assert config["max_num_seqs"] == 4
    assert config["skip_tokenizer_init"] is True
    reasons = bench(tmp_path).summary["variants"][0]["reasons"]
    assert reasons["max_model_len"] == "longest request of the trace, rounded up to 64"
    assert reasons["max_num_seqs"].startswith("number of requests")
    assert reasons["device"] == "a test"
    many = bench(tmp_path, workload="cold-64x2k", scale=0.01).summary
    assert many["variants"][0]["config"]["max_num_seqs"] == many["max_num_seqs"] == 16


def test_settings_given_by_the_user_win(tmp_path: Path) -> None:
    engine = {"max_num_seqs": 2, "max_model_len": 100}
    config = bench(tmp_path, engine=engine).summary["variants"][0]["config"]
    assert (config["max_num_seqs"], config["max_model_len"]) == (2, 100)


def test_switches_without_effect_are_reported_once(tmp_path: Path) -> None:
    switches = Switches(use_cuda_graph=True, use_prefix_cache=True)
    notes = bench(tmp_path, switches=switches, repeats=2).summary["notes"]
    assert not [n for n in notes if "USE_CUDA_GRAPH" in n]  # a flag may have overridden it
    assert len([n for n in notes if "USE_PREFIX_CACHE=1 has no effect on the baseline" in n]) == 1
    engine = {"use_cuda_graph": True, "num_threads": 999}
    notes = bench(tmp_path, engine=engine, repeats=2).summary["notes"]
    assert len([n for n in notes if "(or --use-cuda-graph) has no effect on cpu" in n]) == 1
    assert len([n for n in notes if n.startswith("--num-threads 999 is above")]) == 1
    notes = bench(tmp_path, "extended,no-cuda-graph").summary["notes"]
    assert any("variant 'no-cuda-graph' has no effect on cpu" in n for n in notes)


def test_a_context_above_the_models_is_lowered_and_said_so(tmp_path: Path) -> None:
    summary = bench(tmp_path, workload="single", scale=0.25, switches=Switches(max_seq_len=600),
                    engine={"max_model_len": 600}).summary  # fmt: skip
    assert "MAX_SEQ_LEN=600 is above the model's limit; 512 is used" in summary["notes"]
    assert summary["variants"][0]["config"]["max_model_len"] == 512


def test_recorded_arrivals_need_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no request of shared-4x1k has a field 'arrival'"):
        bench(tmp_path, arrivals="recorded")
    with pytest.raises(ConfigError, match="arrivals='sometimes'"):
        bench(tmp_path, arrivals="sometimes")


def test_a_folder_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written"):
        bench(tmp_path, out=blocker / "run")


def test_results_are_not_overwritten_unless_asked(tmp_path: Path, order: list[str]) -> None:
    bench(tmp_path)
    before, runs = (tmp_path / "run/summary.json").read_text(), len(order)
    with pytest.raises(ConfigError, match="holds the results of an earlier run; .*--force"):
        bench(tmp_path, force=False, seed=5)
    assert (tmp_path / "run/summary.json").read_text() == before
    assert len(order) == runs
    bench(tmp_path, force=True, seed=5)
    (tmp_path / "run/summary.json").unlink()  # a run that never ended may be done again
    bench(tmp_path, force=False)


def test_two_runs_of_one_second_have_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(1, 4):
        session._default_folder("demo").mkdir(parents=True)
        assert len(list(tmp_path.glob("runs/*"))) == number


def test_a_manifest_nested_too_deep_is_damaged(tmp_path: Path) -> None:
    bench(tmp_path)
    (tmp_path / "run/manifest.json").write_text("[" * 100_000)
    with pytest.raises(TraceError, match="is damaged"):
        load_run(tmp_path / "run")


def test_load_run_names_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is not a run folder"):
        load_run(tmp_path)
    bench(tmp_path)
    (tmp_path / "run/steps.jsonl").write_text('{"variant": "x", "repeat": 0}\n')
    with pytest.raises(TraceError, match="is damaged"):
        load_run(tmp_path / "run")


def printed(summary: dict[str, Any]) -> str:
    text = StringIO()
    print_summary(summary, Console(file=text))
    return text.getvalue()


def test_the_table_has_the_columns_of_the_reference(tmp_path: Path) -> None:
    text = printed(without_cache(tmp_path).summary)
    head = next(line for line in text.splitlines() if "scenario" in line)
    titles = """scenario|build|generated tokens|run time|throughput|TPOT end-to-end|TPOT decode-only
        |KV-cache hit rate""".split("|")
    places = [head.index(title.strip()) for title in titles]
    assert places == sorted(places)
    assert "N/A" in next(line for line in text.splitlines() if line.startswith("  plain"))
    assert "speedup extended/plain:" in text
    assert "outputs extended/plain: equal, token for token (4 requests)" in text
    assert "scale=0.03125" in text
    assert "rss" in text


def test_the_table_of_failures_is_printed_too(tmp_path: Path) -> None:
    variants.FACTORIES["origin"] = variants.FACTORIES["extended"] = "bench_fake:BrokenEngine"
    text = printed(bench(tmp_path).summary)
    assert "FAILED origin: ArithmeticError: the numbers went wrong" in text


def test_the_plot_is_drawn_from_the_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = bench(tmp_path)
    drawn = (tmp_path / "run/comparison.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    again = draw_comparison(result.summary, load_run(tmp_path / "run"), tmp_path / "again.png")
    assert again.stat().st_size > 10_000


def test_median_of_runs() -> None:
    runs = [{"a": 1, "b": {"c": 3.0, "d": None}, "e": False, "f": "x"} for _ in range(2)]
    runs.append({"a": 4, "b": {"c": 9.0, "d": None}, "e": True, "f": "x"})
    assert median_of(runs) == {"a": 1, "b": {"c": 3.0, "d": None}, "e": True, "f": "x"}
    assert median_of([1, 2]) == 1.5
    assert median_of([2.0, 4.0]) == 3.0


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([], [1], 0)],
)
def test_first_divergence(left: list[int], right: list[int], position: int | None) -> None:
    assert first_divergence(left, right) == position


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="repeats=0"):
        replace(BenchOptions(), repeats=0)
