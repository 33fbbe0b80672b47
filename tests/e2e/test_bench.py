"""The benchmark over the real engines and the real model, in real processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny_vllm.bench.folder import load_run
from tiny_vllm.bench.results import summarize

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.real_model


def bench(out: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tiny_vllm", "bench", "--quiet", "--out", str(out), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """4 requests, 128 common tokens, in float32: greedy outputs must be equal."""
    out = tmp_path_factory.mktemp("bench") / "run"
    summary = bench(
        out,
        *("--workload", "shared-4x1k", "--scale", "0.125", "--max-new-tokens", "8"),
        *("--dtype", "float32", "--variants", "origin,extended,no-prefix-cache"),
    )
    return out, summary


def test_baseline_equals_extended_token_for_token(run: tuple[Path, dict[str, Any]]) -> None:
    _, summary = run
    assert [v["generated_tokens"] for v in summary["variants"]] == [32, 32, 32]
    assert summary["outputs_match"]["extended/origin"]["equal"]
    assert summary["outputs_match"]["no-prefix-cache/origin"]["equal"]
    assert len({v["outputs_sha256"] for v in summary["variants"]}) == 1


def test_the_cache_is_counted_where_there_is_one(run: tuple[Path, dict[str, Any]]) -> None:
    """3 of 4 requests find the 128 common tokens: 384 of 544."""
    origin, extended, plain = run[1]["variants"]
    assert 384 <= extended["cache"]["cached_tokens"] < 390
    assert origin["cache"]["cached_tokens"] == plain["cache"]["cached_tokens"] == 0
    for variant in (origin, extended, plain):
        cache = variant["cache"]
        assert cache["cached_tokens"] + cache["computed_tokens"] == 544
    assert extended["kv_bytes"]["physical"] < origin["kv_bytes"]["physical"]


def test_no_run_beats_the_measured_machine(run: tuple[Path, dict[str, Any]]) -> None:
    for variant in run[1]["variants"]:
        limit = variant["roofline"]
        assert 0 < limit["floor_s"] < variant["wall_s"]
        assert 0 < limit["mbu"] < 1
        assert 0 < limit["mfu"] < 1
        assert not limit["impossible"]


def test_the_folder_gives_the_same_summary(run: tuple[Path, dict[str, Any]]) -> None:
    out, summary = run
    assert summarize(load_run(out)) == summary == json.loads((out / "summary.json").read_text())


def test_steps_account_for_every_token(run: tuple[Path, dict[str, Any]]) -> None:
    data = load_run(run[0])
    for variant in run[1]["variants"]:
        steps = data.steps[(variant["name"], 0)]
        assert sum(s.num_prefill_tokens for s in steps) == variant["cache"]["computed_tokens"]
        assert sum(s.num_sampled for s in steps) == variant["generated_tokens"]


def test_demo_is_a_real_document_in_the_models_own_tokens(tmp_path: Path) -> None:
    """About 1500 tokens and a question each; four new tokens keep the test short."""
    summary = bench(
        tmp_path / "run", "--workload", "demo", "--variants", "extended", "--max-new-tokens", "2"
    )
    (extended,) = summary["variants"]
    assert (extended["requests"], extended["failed"]) == (16, 0)
    assert 16 * 1450 < extended["prompt_tokens"] < 16 * 1650
    assert extended["cache"]["token_hit_rate"] > 0.9
