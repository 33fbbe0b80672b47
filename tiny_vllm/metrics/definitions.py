"""The only definitions of latency, throughput and hit-rate numbers.

Pure arithmetic on plain numbers, as vLLM's benchmark defines them. Times are seconds on
one clock; a value that does not exist is None, never 0 and never NaN. Output tokens of a
request share a time when one step yielded them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiny_vllm.protocol import StepRecord

Distribution = dict[str, float | None]


def ttft_s(arrival: float, token_times: Sequence[float]) -> float | None:
    """Time to first token; None without a token."""
    return token_times[0] - arrival if token_times else None


def e2el_s(arrival: float, token_times: Sequence[float]) -> float | None:
    """End-to-end latency: arrival to the last token; None without a token."""
    return token_times[-1] - arrival if token_times else None


def tpot_s(token_times: Sequence[float]) -> float | None:
    """Time per output token after the first: (E2EL - TTFT) / (n - 1); None for n < 2."""
    if len(token_times) < 2:
        return None
    return (token_times[-1] - token_times[0]) / (len(token_times) - 1)


def itl_s(token_times: Sequence[float]) -> list[float]:
    """Gaps between output tokens, the first token not among them: n - 1 values.

    A step that yields k tokens (k equal times) splits its time over them: k gaps of
    ``step / k``. The gaps always sum to E2EL - TTFT.
    """
    gaps: list[float] = []
    start = 1
    while start < len(token_times):
        end = start + 1
        while end < len(token_times) and token_times[end] == token_times[start]:
            end += 1
        share = (token_times[start] - token_times[start - 1]) / (end - start)
        gaps += [share] * (end - start)
        start = end
    return gaps


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between ranks (NumPy's default).

    Raises:
        ValueError: no values, or ``percent`` outside [0, 100].
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values is undefined")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values: Iterable[float | None]) -> Distribution:
    """``{"mean", "p50", "p90", "p99"}`` of the values that exist; all None if none does."""
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "p50": None, "p90": None, "p99": None}
    return {
        "mean": sum(known) / len(known),
        "p50": percentile(known, 50),
        "p90": percentile(known, 90),
        "p99": percentile(known, 99),
    }


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``, None when there is no whole."""
    return part / whole if whole else None


def throughput_tok_s(generated_tokens: int, wall_s: float) -> float | None:
    """Generated tokens per second of wall time."""
    return ratio(generated_tokens, wall_s)


def tpot_e2e_ms(wall_s: float, generated_tokens: int) -> float | None:
    """Wall milliseconds per generated token, over all requests."""
    return ratio(wall_s * 1e3, generated_tokens)


def tpot_decode_ms(decode_s: float, decoded_tokens: int) -> float | None:
    """Milliseconds of decode-only steps per token that came out of them."""
    return ratio(decode_s * 1e3, decoded_tokens)


def token_hit_rate(cached_tokens: int, prompt_tokens: int) -> float | None:
    """Cached prompt tokens / prompt tokens."""
    return ratio(cached_tokens, prompt_tokens)


def block_hit_rate(blocks_found: int, blocks_asked: int) -> float | None:
    """Full blocks found / full blocks asked for, at first admission."""
    return ratio(blocks_found, blocks_asked)


def prefill_tok_s(computed_tokens: int, prefill_s: float) -> float | None:
    """Prompt tokens really computed per second of the steps that computed them."""
    return ratio(computed_tokens, prefill_s)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Wall seconds by kind of step; ``prefill_s`` covers every step with prefill tokens."""

    prefill_s: float
    decode_s: float
    decoded_tokens: int  # tokens out of decode-only steps


def step_times(steps: Iterable[StepRecord]) -> StepTimes:
    """Split the time of ``steps`` into those with prefill tokens and the others."""
    prefill = decode = 0.0
    decoded = 0
    for step in steps:
        if step.num_prefill_tokens:
            prefill += step.end - step.start
        else:
            decode += step.end - step.start
            decoded += step.num_sampled
    return StepTimes(prefill, decode, decoded)


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """What a request must keep to count as good; None sets no limit. Seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def met_by(self, arrival: float, token_times: Sequence[float]) -> bool:
        """True when the request has a token and keeps every limit (TPOT of n = 1 passes)."""
        pairs = (
            (ttft_s(arrival, token_times), self.ttft_s),
            (tpot_s(token_times), self.tpot_s),
            (e2el_s(arrival, token_times), self.e2el_s),
        )
        kept = all(v is None or limit is None or v <= limit for v, limit in pairs)
        return bool(token_times) and kept


def goodput_req_s(
    requests: Iterable[tuple[float, Sequence[float]]], limits: LatencyLimits, wall_s: float
) -> float | None:
    """Requests per second that keep ``limits``; each is (arrival, token times)."""
    return ratio(sum(limits.met_by(arrival, times) for arrival, times in requests), wall_s)
