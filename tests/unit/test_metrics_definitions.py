"""Every metric against numbers worked out by hand."""

import pytest

from tiny_vllm import metrics
from tiny_vllm.metrics import LatencyLimits, PeakMemory
from tiny_vllm.protocol import StepRecord


def step(start: float, end: float, *, decode: int, prefill: int, sampled: int) -> StepRecord:
    return StepRecord(0, start, end, decode, prefill, 1, sampled)


def test_latencies_of_one_request() -> None:
    times = [3.0, 3.5, 4.5]
    assert metrics.ttft_s(1.0, times) == 2.0
    assert metrics.e2el_s(1.0, times) == 3.5
    assert metrics.tpot_s(times) == 0.75  # (3.5 - 2.0) / 2
    assert metrics.itl_s(times) == [0.5, 1.0]


def test_tpot_of_a_single_token_is_undefined() -> None:
    """Case 3: null, not 0 and not NaN."""
    assert metrics.tpot_s([5.0]) is None
    assert metrics.itl_s([5.0]) == []
    assert metrics.ttft_s(1.0, [5.0]) == 4.0


def test_no_token_has_no_latency() -> None:
    assert metrics.ttft_s(0.0, []) is None
    assert metrics.e2el_s(0.0, []) is None
    assert metrics.tpot_s([]) is None
    assert metrics.itl_s([]) == []


def test_case_20_a_step_with_several_tokens_splits_its_time() -> None:
    """Case 20: two tokens out of one 0.6 s step are two gaps of 0.3 s, not 0.6 and 0."""
    times = [1.0, 1.6, 1.6, 2.0]
    assert metrics.itl_s(times) == pytest.approx([0.3, 0.3, 0.4])
    assert sum(metrics.itl_s(times)) == pytest.approx(times[-1] - times[0])


def test_tokens_beside_the_first_one_have_no_gap() -> None:
    """The first step's time is TTFT; its other tokens came at the same moment."""
    assert metrics.itl_s([1.0, 1.0, 2.0]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 10.0), (50, 25.0), (90, 37.0), (99, 39.7), (100, 40.0)]
)
def test_percentile_interpolates_between_ranks(percent: float, expected: float) -> None:
    assert metrics.percentile([40.0, 10.0, 30.0, 20.0], percent) == pytest.approx(expected)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_an_undefined_percentile_raises(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="undefined"):
        metrics.percentile(values, percent)


def test_distribution_leaves_out_what_does_not_exist() -> None:
    found = metrics.distribution([1.0, None, 3.0])
    assert found == pytest.approx({"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98})
    assert set(metrics.distribution([None]).values()) == {None}


def test_totals_of_the_reference_table() -> None:
    """15358 tokens in 16242.3 ms, of which 12841.2 ms decode: the baseline's row."""
    assert metrics.throughput_tok_s(15358, 16.2423) == pytest.approx(945.557, abs=2e-3)
    assert metrics.tpot_e2e_ms(16.2423, 15358) == pytest.approx(1.05758, abs=1e-5)
    assert metrics.tpot_decode_ms(12.8412, 15358) == pytest.approx(0.836126, abs=1e-5)


def test_quotients_without_a_whole_are_undefined() -> None:
    assert metrics.throughput_tok_s(3, 0.0) is None
    assert metrics.tpot_decode_ms(0.0, 0) is None
    assert metrics.block_hit_rate(0, 0) is None
    assert metrics.token_hit_rate(0, 10) == 0.0
    assert metrics.token_hit_rate(512, 1026) == pytest.approx(0.49903, abs=1e-5)


def test_mixed_steps_count_as_prefill_time() -> None:
    steps = [
        step(0.0, 1.0, decode=0, prefill=8, sampled=1),
        step(1.0, 1.5, decode=3, prefill=8, sampled=4),
        step(2.0, 2.25, decode=4, prefill=0, sampled=4),
        step(2.25, 2.5, decode=4, prefill=0, sampled=4),
    ]
    times = metrics.step_times(steps)
    assert times == metrics.StepTimes(prefill_s=1.5, decode_s=0.5, decoded_tokens=8)


def test_case_22_prefill_rate_divides_computed_tokens_by_the_time_spent_on_them() -> None:
    """Case 22: 100 computed tokens in 0.5 s, whatever the time to the first token was."""
    assert metrics.prefill_tok_s(100, 0.5) == 200.0


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    requests = [
        (0.0, [0.5, 0.6, 0.7]),  # good
        (0.0, [2.0, 2.1]),  # late first token
        (0.0, [0.5, 1.5]),  # slow tokens
        (0.0, [0.9]),  # good: no TPOT to break
        (0.0, []),  # failed
    ]
    limits = LatencyLimits(ttft_s=1.0, tpot_s=0.2)
    assert metrics.goodput_req_s(requests, limits, 4.0) == 0.5
    assert metrics.goodput_req_s(requests, LatencyLimits(), 4.0) == 1.0


def test_peak_memory_names_its_kind() -> None:
    found = metrics.peak_rss()
    assert found.kind == "rss"
    assert found.num_bytes > 1 << 20
    with pytest.raises(AssertionError):
        PeakMemory(1, "gpu")
