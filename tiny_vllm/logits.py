"""What happens to logits before a token is drawn, and the log-probabilities of a row.

Private to the sampler. Owns `SamplingRow`, the edits (bias, masks, penalties), the filters
(min_p, top_k, top_p) and `token_logprobs`. Filters are thresholds: tokens tied with the last
one kept are kept too, so the result depends neither on a sort order nor on other rows.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.outputs import Logprob, TokenLogprobs
from tiny_vllm.sampling_params import SamplingParams

_NEG_INF = float("-inf")
_TOP_P_PREFIX = 1024  # most likely tokens looked at before a row is sorted as a whole


@dataclass(slots=True)
class SamplingRow:
    """One row of the logits: the request it belongs to and what the request has seen.

    Attributes:
        output_token_ids: the output so far; may be a live list, it is read in `sample`.
        eos_token_ids: the model's end-of-sequence ids, masked while ``min_tokens`` lasts.
        generator: needed unless the row is greedy; only its seed is read, its state never
            moves (see `Sampler`).
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: frozenset[int] = frozenset()
    generator: torch.Generator | None = None

    @property
    def needs_min_tokens(self) -> bool:
        return len(self.output_token_ids) < self.params.min_tokens

    @property
    def edits_logits(self) -> bool:
        """True when bias, masks or penalties change this row in this step."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or bool(params.logit_bias)
            or self.needs_min_tokens
        )

    @property
    def filters_logits(self) -> bool:
        """True when only a part of the vocabulary may be drawn."""
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0

    def stopping_ids(self) -> set[int]:
        """Ids that would end the request: its stop ids, and the model's unless ignored."""
        ids = set(self.params.stop_token_ids)
        return ids if self.params.ignore_eos else ids | self.eos_token_ids


def edit_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply bias, min_tokens mask and penalties, in this order.

    Returns:
        The edited copy, or ``logits`` itself when no row asks for anything. [rows, vocab]
    """
    if not any(row.edits_logits for row in rows):
        return logits
    logits = logits.clone()
    _add_bias(logits, rows)
    _mask_stopping_ids(logits, rows)
    _penalise_repetition(logits, rows)
    _penalise_output(logits, rows)
    return logits


def _places(
    ids_per_row: Iterable[Iterable[int]], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """(row, token id) index tensors of the logits to change, None when there are none."""
    per_row = [list(ids) for ids in ids_per_row]
    token_ids = [token_id for ids in per_row for token_id in ids]
    if not token_ids:
        return None
    counts = torch.tensor([len(ids) for ids in per_row])
    rows = torch.repeat_interleave(torch.arange(len(per_row)), counts)
    return rows.to(device), torch.tensor(token_ids, device=device)


def _floats(values: Iterable[float], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32, device=like.device)


def _add_bias(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    biases = [row.params.logit_bias or {} for row in rows]
    places = _places(biases, logits.device)
    if places is not None:
        logits[places] += _floats((value for bias in biases for value in bias.values()), logits)


def _mask_stopping_ids(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    masked = (row.stopping_ids() if row.needs_min_tokens else () for row in rows)
    places = _places(masked, logits.device)
    if places is not None:
        logits[places] = _NEG_INF


def _penalise_repetition(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    penalties = [row.params.repetition_penalty for row in rows]
    seen: list[Iterable[int]] = [
        () if penalty == 1.0 else {*row.prompt_token_ids, *row.output_token_ids}
        for row, penalty in zip(rows, penalties, strict=True)
    ]
    places = _places(seen, logits.device)
    if places is not None:
        penalty, value = _floats(penalties, logits)[places[0]], logits[places]
        logits[places] = torch.where(value > 0, value / penalty, value * penalty)


def _penalise_output(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    presence = [row.params.presence_penalty for row in rows]
    frequency = [row.params.frequency_penalty for row in rows]
    counts: list[Counter[int]] = [
        Counter(row.output_token_ids) if p or f else Counter()
        for row, p, f in zip(rows, presence, frequency, strict=True)
    ]
    places = _places(counts, logits.device)
    if places is not None:
        count = _floats((n for counter in counts for n in counter.values()), logits)
        per_use = _floats(frequency, logits)[places[0]]
        logits[places] -= _floats(presence, logits)[places[0]] + per_use * count


def filter_logits(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to -inf, in place, what min_p, top_k and top_p leave out; in this order.

    Args:
        scaled: logits divided by temperature, shifted so that each row's maximum is 0.
            [rows, vocab]
    """
    floor = torch.full((len(params),), _NEG_INF, device=scaled.device)
    _raise_to_min_p(floor, params)
    _raise_to_top_k(floor, scaled, params)
    if any(p.min_p > 0.0 or p.top_k > 0 for p in params):
        scaled.masked_fill_(scaled < floor[:, None], _NEG_INF)
    _apply_top_p(scaled, params)


def _raise_to_min_p(floor: Tensor, params: Sequence[SamplingParams]) -> None:
    if any(p.min_p > 0.0 for p in params):
        lowest = [math.log(p.min_p) if p.min_p > 0.0 else _NEG_INF for p in params]
        floor.copy_(torch.maximum(floor, _floats(lowest, floor)))


def _raise_to_top_k(floor: Tensor, scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    vocab_size = scaled.shape[1]
    chosen = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if not chosen:
        return
    top_k = torch.tensor([params[i].top_k for i in chosen], device=scaled.device)
    best = scaled[chosen].topk(max(params[i].top_k for i in chosen)).values  # [chosen, max top_k]
    kth = best.gather(1, top_k[:, None] - 1)[:, 0]
    floor[chosen] = torch.maximum(floor[chosen], kth)


def _apply_top_p(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    chosen = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if not chosen:
        return
    kept = scaled[chosen]  # [chosen, vocab]
    target = _floats((params[i].top_p for i in chosen), scaled).double()
    target *= kept.exp().sum(dim=-1, dtype=torch.float64)
    floor, reached = _nucleus_floor(kept, target, _TOP_P_PREFIX)
    if not bool(reached.all()):
        rest = ~reached
        floor[rest] = _nucleus_floor(kept[rest], target[rest], kept.shape[1])[0]
    scaled[chosen] = kept.masked_fill(kept < floor[:, None], _NEG_INF)


def _nucleus_floor(kept: Tensor, target: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The smallest logit of the nucleus, and whether it lies in the ``width`` best of the row."""
    best = kept.topk(min(width, kept.shape[1])).values
    mass = best.exp().cumsum(dim=-1, dtype=torch.float64)
    short = (mass < target[:, None]).sum(dim=-1)  # tokens whose mass does not reach the target
    last = short.clamp(max=best.shape[1] - 1)
    return best.gather(1, last[:, None])[:, 0], short < best.shape[1]


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities under the model's own distribution, one mapping per row.

    Each holds ``token_ids[i]`` first, then the ``num_top[i]`` most likely tokens. Ranks start
    at 1 and equal log-probabilities share one.

    Args:
        logits: as the model gave them. [rows, vocab] float32
    """
    own_ids = torch.tensor(list(token_ids), device=logits.device)[:, None]
    own = logits.gather(1, own_ids)
    total = logits.logsumexp(dim=-1, keepdim=True)
    ranks = ((logits > own).sum(dim=-1) + 1).tolist()
    best = logits.topk(min(max(num_top, default=0), logits.shape[1]))
    best_ids, best_values = best.indices.tolist(), (best.values - total).tolist()
    own_values = (own - total)[:, 0].tolist()
    return [
        _mapping(token_ids[i], Logprob(own_values[i], ranks[i]), best_ids[i][:n], best_values[i])
        for i, n in enumerate(num_top)
    ]


def _mapping(
    token_id: int, own: Logprob, ids: Sequence[int], values: Sequence[float]
) -> dict[int, Logprob]:
    result = {token_id: own}
    rank, previous = 0, math.inf
    # Sorted again: topk leaves the order of equal values open.
    by_value = sorted(zip(ids, values, strict=False), key=lambda pair: (-pair[1], pair[0]))
    for position, (other, value) in enumerate(by_value, start=1):
        if value != previous:
            rank, previous = position, value
        result.setdefault(other, Logprob(value, rank))
    return result
