"""Batched sampling: logits [rows, vocab] in, one token or one error per row out.

Order: logit_bias, min_tokens mask, repetition penalty, presence and frequency penalty,
temperature, min_p, top_k, top_p, draw. Log-probabilities are those of the unedited logits.
A row's result depends on its own logits, request and seed only: not on the batch, not on
its place in it, and not on a preemption between two tokens. `sample` raises for no row.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.logits import SamplingRow, edit_logits, filter_logits, token_logprobs
from tiny_vllm.outputs import TokenLogprobs
from tiny_vllm.protocol import SampledToken
from tiny_vllm.sampling_params import SamplingParams

__all__ = [
    "SampleError",
    "Sampler",
    "SamplingRow",
    "make_generator",
    "prompt_logprobs",
    "request_seed",
]

_MIN_TEMPERATURE = 1e-6  # below it float32 cannot hold the quotient; the draw is arg-max anyway
_MAX_CANDIDATES = 1024  # filtered rows with at most so many tokens draw among these alone
_CPU_CHUNK = 1 << 18  # logits per piece of a race on a CPU: its temporaries stay in the cache
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleError:
    """A row from which no token can be drawn; the request it belongs to has to end."""

    message: str


def make_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The random source of one request. ``seed`` is any signed 64-bit number."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return generator


def request_seed(params: SamplingParams, engine_seed: int, request_id: str) -> int:
    """The caller's seed, or one that only the engine's seed and the request's id decide."""
    if params.seed is not None:
        return params.seed
    digest = hashlib.blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, next_token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that follow each position.

    Args:
        logits: [n, vocab] float32
        next_token_ids: the prompt token after each of the n positions.
        num_top: most likely tokens reported beside it.
    """
    return token_logprobs(logits, next_token_ids, [num_top] * len(next_token_ids))


class Sampler:
    """Draws one token per row.

    Greedy rows take the arg-max, ties to the lowest id. Other rows run a Gumbel race
    (Gumbel-max trick, Gumbel 1954): every token's scaled logit gets noise that is a function
    of (seed, number of output tokens, token id), and the highest sum wins. Noise bound to
    the token id keeps the draw stable when logits move by a rounding error, and no state
    means that a resumed request draws what it would have drawn.
    """

    @staticmethod
    def results(
        token_ids: Sequence[int], peaks: Sequence[float]
    ) -> list[SampledToken | SampleError]:
        """Results of rows that the device drew already.

        Args:
            peaks: the largest logit of each row.
        """
        return [_result(i, peak) for i, peak in zip(token_ids, peaks, strict=True)]

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Sequence[SamplingRow]
    ) -> list[SampledToken | SampleError]:
        """Return one result per row, in order.

        Args:
            logits: float32, left unchanged. [rows, vocab]
        """
        if not rows:
            return []
        edited = edit_logits(logits, rows)
        token_ids = edited.argmax(dim=-1)  # NaN counts as the maximum
        peak = edited.gather(1, token_ids[:, None])[:, 0]
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if drawn:
            token_ids[drawn] = _draw(edited, peak, rows, drawn)
        health = peak if edited is logits else peak + 0 * logits.amax(dim=-1)  # NaN and inf stay
        ids, peaks = torch.stack((token_ids.double(), health.double())).tolist()  # one transfer
        results: list[SampledToken | SampleError] = [
            _result(int(token_id), value) for token_id, value in zip(ids, peaks, strict=True)
        ]
        _attach_logprobs(results, logits, rows)
        return results


def _result(token_id: int, peak: float) -> SampledToken | SampleError:
    if math.isfinite(peak):
        return SampledToken(token_id)
    if peak == -math.inf:
        return SampleError(
            "every token is masked: logit_bias, stop_token_ids with min_tokens or the model "
            "leave no token with a finite logit"
        )
    return SampleError(f"the model gave a logit that is not finite ({peak}); the request ends")


def _attach_logprobs(
    results: Sequence[SampledToken | SampleError], logits: Tensor, rows: Sequence[SamplingRow]
) -> None:
    wanted = [
        (i, result, row.params.logprobs)
        for i, (result, row) in enumerate(zip(results, rows, strict=True))
        if row.params.logprobs is not None and isinstance(result, SampledToken)
    ]
    if not wanted:
        return
    indices, sampled, num_top = zip(*wanted, strict=True)
    logprobs = token_logprobs(logits[list(indices)], [s.token_id for s in sampled], num_top)
    for result, entry in zip(sampled, logprobs, strict=True):
        result.logprobs = entry


def _draw(
    logits: Tensor, peak: Tensor, rows: Sequence[SamplingRow], drawn: Sequence[int]
) -> Tensor:
    """Token ids of the rows ``drawn``. [drawn] int64"""
    chosen = [rows[i] for i in drawn]
    params = [row.params for row in chosen]
    temperature = torch.tensor([p.temperature for p in params], device=logits.device)
    # Shifted before it is divided: no temperature can turn the maximum into inf.
    scaled = logits[list(drawn)] - peak[list(drawn)][:, None]
    scaled /= temperature.clamp(min=_MIN_TEMPERATURE)[:, None]
    if any(row.filters_logits for row in chosen):
        filter_logits(scaled, params)
    keys = torch.tensor([_step_key(row) for row in chosen], dtype=torch.int32)
    return _race(scaled, keys.to(logits.device), all(row.filters_logits for row in chosen))


def _race(scaled: Tensor, keys: Tensor, is_filtered: bool) -> Tensor:
    vocab_size = scaled.shape[1]
    if is_filtered:
        num_kept = max(1, int((scaled > -math.inf).sum(dim=-1).max()))
        if num_kept <= min(_MAX_CANDIDATES, vocab_size // 2):
            values, ids = scaled.topk(num_kept)  # all kept tokens of every row
            winner = (values + _gumbel(keys, ids.int())).argmax(dim=-1, keepdim=True)
            return ids.gather(1, winner)[:, 0]
    ids = torch.arange(vocab_size, dtype=torch.int32, device=scaled.device)
    num_rows = len(scaled) if scaled.is_cuda else max(1, _CPU_CHUNK // vocab_size)
    parts = zip(scaled.split(num_rows), keys.split(num_rows), strict=True)
    return torch.cat([_gumbel(key, ids).add_(part).argmax(dim=-1) for part, key in parts])


def _step_key(row: SamplingRow) -> tuple[int, int]:
    """Two signed 32-bit words from the seed and the position (splitmix64, Steele et al. 2014)."""
    assert row.generator is not None, "a row that is not greedy needs a generator"
    position = len(row.output_token_ids) + 1
    x = _mix64(row.generator.initial_seed() & _MASK64)
    x = _mix64(x + position * 0x9E3779B97F4A7C15 & _MASK64)
    return _signed32(x >> 32), _signed32(x)


def _mix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31


def _signed32(x: int) -> int:
    return (x & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of every (key, token id). [rows, ids] float32

    Counter based (Salmon et al. 2011) in 32-bit integers: the cheapest form on a CPU, and
    the same bits on every device.
    """
    x = ids * -1640531527 + keys[:, :1]
    x = _scramble_(_scramble_(x) ^ keys[:, 1:])
    # 31 bits, read so that small values keep full precision: they decide the race.
    uniform = x.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _scramble_(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3 (Appleby), in place and in wrapping arithmetic."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(-2048144789)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(-1028477387)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
