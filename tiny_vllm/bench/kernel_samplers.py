"""Prepares the sampling ops for `bench.kernels`. Imports torch.

Draws are compared token by token with `tiny_vllm.sampler`. What stands beside them in plain
torch draws from the same distribution with torch's own random numbers, and sorts to filter.
"""

import torch
from torch import Tensor

from tiny_vllm.bench.kernel_cases import Case
from tiny_vllm.bench.kernel_timing import Built, Place
from tiny_vllm.sampling_params import SamplingParams

TORCH = "torch"
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9
CHECKED_ROWS = 32
LOGIT_SPREAD = 3.0  # a few hundred tokens matter, as in text


def _logits(case: Case, place: Place) -> Tensor:
    shape = (place.copies(case.num_bytes), case.rows, place.config.vocab_size)
    return torch.randn(shape, device=place.device).mul_(LOGIT_SPREAD)


def _outputs(case: Case, place: Place) -> tuple[Tensor, Tensor]:
    ids = torch.full((case.rows,), -1, device=place.device)
    return ids, torch.full((case.rows,), torch.nan, device=place.device)


def _difference(ids: Tensor, wanted: list[int]) -> str | None:
    """Rows in a hundred may end on another side of a rounding error."""
    wrong = sum(a != b for a, b in zip(ids.tolist(), wanted, strict=False))
    return f"{wrong} of {len(wanted)} tokens differ" if wrong > len(wanted) // 32 else None


def greedy_case(case: Case, place: Place) -> Built:
    from tiny_vllm.ops.kernels.sample import greedy
    from tiny_vllm.ops.kernels.sample_peak import make_workspace

    logits, (ids, peaks) = _logits(case, place), _outputs(case, place)
    space = make_workspace(case.rows, logits.shape[2], place.device, filters=False)

    def kernel(i: int) -> None:
        greedy(logits[i], ids, peaks, workspace=space)

    def check() -> str | None:
        kernel(0)
        if not torch.equal(peaks, logits[0].amax(-1)):
            return "the maxima differ"
        found = logits[0].gather(1, ids[:, None])[:, 0]
        return None if torch.equal(found, peaks) else "the tokens are not at the maxima"

    return Built(kernel, {TORCH: lambda i: logits[i].argmax(-1)}, check, len(logits))


def gumbel_case(case: Case, place: Place) -> Built:
    return _draw_case(case, place, SamplingParams(temperature=TEMPERATURE))


def filtered_case(case: Case, place: Place) -> Built:
    params = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P)
    return _draw_case(case, place, params)


def _draw_case(case: Case, place: Place, params: SamplingParams) -> Built:
    from tiny_vllm.ops.kernels.sample import gumbel
    from tiny_vllm.ops.kernels.sample_filter import Filters
    from tiny_vllm.ops.kernels.sample_peak import make_workspace

    device, rows = place.device, case.rows
    logits, (ids, peaks) = _logits(case, place), _outputs(case, place)
    is_filtered = params.top_k > 0
    space = make_workspace(rows, logits.shape[2], device, filters=is_filtered)
    heat = torch.full((rows,), params.temperature, device=device)
    seeds = torch.arange(rows, device=device) * 7919
    num_outputs = torch.zeros(rows, dtype=torch.int64, device=device)
    filters = None
    if is_filtered:
        filters = Filters(
            torch.full((rows,), params.top_k, dtype=torch.int32, device=device),
            torch.full((rows,), params.top_p, device=device),
            torch.zeros(rows, device=device),
        )

    def kernel(i: int) -> None:
        gumbel(logits[i], heat, seeds, num_outputs, ids, peaks, filters=filters, workspace=space)

    def check() -> str | None:
        kernel(0)
        count = min(rows, CHECKED_ROWS)
        return _difference(ids, _sampled(logits[0, :count], params, seeds[:count].tolist()))

    def plain(i: int) -> Tensor:
        scaled = logits[i] / heat[:, None]
        return _race(_filter(scaled) if is_filtered else scaled)

    # torch's sort of long rows takes hundreds of launches: not for a graph
    copies, captures = len(logits), not is_filtered
    return Built(kernel, {TORCH: plain}, check, copies, references_capture=captures)


def _sampled(logits: Tensor, params: SamplingParams, seeds: list[int]) -> list[int]:
    """Token ids by the definition."""
    from tiny_vllm.logits import SamplingRow
    from tiny_vllm.sampler import Sampler, make_generator

    rows = [SamplingRow(params, [], [], frozenset(), make_generator(seed)) for seed in seeds]
    return [getattr(result, "token_id", -2) for result in Sampler().sample(logits, rows)]


def _filter(scaled: Tensor) -> Tensor:
    values, order = scaled.sort(dim=-1, descending=True)
    values[:, TOP_K:] = -torch.inf
    before = values.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    values.masked_fill_(before >= TOP_P, -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, values)


def _race(scaled: Tensor) -> Tensor:
    """Exponential race: p / e is largest for token t with probability p[t]."""
    probs = scaled.softmax(-1)
    return probs.div_(torch.empty_like(probs).exponential_()).argmax(-1)
