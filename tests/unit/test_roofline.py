"""The physical floor by hand, and the published figures that it must catch."""

import pytest
from bench_fake import make_info

from tiny_vllm.metrics import Peaks, run_roofline, step_work
from tiny_vllm.protocol import KvBytes, StepRecord

# Llama-3.2-1B in bf16 on the reference's laptop GPU
LLAMA = make_info(
    dtype="bfloat16",
    weight_bytes=2_471_000_000,
    kv_bytes_per_token=32768,
    linear_flops_per_token=2 * 973_000_000,
    lm_head_flops_per_token=2 * 262_000_000,
    attention_flops_per_context_token=4 * 16 * 32 * 64,
)
LAPTOP = Peaks(bandwidth=336e9, flops=51e12, cache_bytes=3 << 20)


def decode_steps(count: int, seconds: float, batch: int) -> list[StepRecord]:
    return [
        StepRecord(i, i * seconds, (i + 1) * seconds, batch, 0, batch, batch, num_logit_rows=batch)
        for i in range(count)
    ]


def test_work_of_a_step_by_hand() -> None:
    """Weights 400 once + unique KV 96 + 3 tokens x 8 written; 3 x 100 + 2 x 50 + 30 x 2."""
    step = StepRecord(
        0, 0.0, 1.0, 1, 2, 2, 2,
        kv_bytes=KvBytes(logical=200, physical=96), attention_context_tokens=30, num_logit_rows=2,
    )  # fmt: skip
    work = step_work(step, make_info())
    assert (work.num_bytes, work.flops) == (400 + 96 + 24, 300 + 100 + 60)
    assert work.floor_s(Peaks(bandwidth=104.0, flops=1000.0)) == 5.0  # memory-bound
    assert work.floor_s(Peaks(bandwidth=1e9, flops=46.0)) == 10.0  # compute-bound


def test_a_step_without_tokens_has_no_floor() -> None:
    assert step_work(StepRecord(0, 0.0, 1.0, 0, 0, 0, 0), make_info()).num_bytes == 0


def test_a_set_that_fits_the_cache_has_no_byte_floor() -> None:
    """A tiny model may beat main memory: only its FLOPs bound it."""
    (step,) = decode_steps(1, 1.0, batch=1)
    work = step_work(step, make_info())
    assert work.floor_s(Peaks(100.0, 150.0, cache_bytes=1000)) == 1.0
    assert work.floor_s(Peaks(100.0, 150.0, cache_bytes=10)) == 4.08


def test_shares_and_utilisation() -> None:
    steps = decode_steps(2, 1.0, batch=1)  # 408 bytes and 150 FLOP each
    found = run_roofline(steps, make_info(), Peaks(1020.0, 1000.0), wall_s=4.0)
    assert found.floor_s == pytest.approx(0.8)
    assert found.mbu == pytest.approx(816 / 1020 / 4)
    assert found.mfu == pytest.approx(300 / 1000 / 4)
    assert found.share == pytest.approx(0.2)
    assert not found.impossible


@pytest.mark.parametrize("wall_s", [4.60486, 16.2423])
def test_published_figures_are_impossible(wall_s: float) -> None:
    """15358 tokens, 2 a step: 7679 steps x 7.35 ms = 56.5 s at 336 GB/s. Both published run
    times, 4.6 s and 16.2 s, are below it; a run just above it passes."""
    steps = decode_steps(7679, wall_s / 7679, batch=2)
    found = run_roofline(steps, LLAMA, LAPTOP, wall_s)
    assert found.floor_s == pytest.approx(56.5, rel=0.01)
    assert found.impossible
    assert found.mbu > 1


def test_a_run_above_its_floor_is_possible() -> None:
    steps = decode_steps(7679, 57.0 / 7679, batch=2)
    assert not run_roofline(steps, LLAMA, LAPTOP, 57.0).impossible


def test_an_impossible_decode_is_not_hidden_by_a_slow_prefill() -> None:
    """The published decode TPOT of 0.0841 ms x 2 a step, behind a prefill of a minute."""
    prefill = StepRecord(0, 0.0, 60.0, 0, 1026, 2, 2, num_logit_rows=2)
    steps = [prefill, *decode_steps(7679, 0.0841213e-3 * 2, batch=2)]
    assert run_roofline(steps, LLAMA, LAPTOP, wall_s=61.3).impossible
