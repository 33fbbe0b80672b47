"""min_p, top_k and top_p as one threshold a row: a pivot search, nothing is sorted.

The twin of `tiny_vllm.logits.filter_logits`: what is at or above a row's floor is kept.
Distances below the peak ("depths", never negative) are compared as integers, their bits
having the same order. The search is exact: top_k by counts; top_p by masses added in
float64 in a fixed order. A floor can differ from the definition's only where another
last bit of exp, or the order of the sum, decides whether a mass reaches top_p.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tiny_vllm.ops.kernels.sample_math import mass_below
from tiny_vllm.ops.kernels.sample_peak import (
    Workspace,
    best_key,
    find_peaks,
    key_value,
    make_workspace,
    scaled_logits,
    tiling,
)

_BEYOND = tl.constexpr(0x7FFFFFFF)  # sorts behind every depth
_MARGIN = tl.constexpr(1.0001)  # more than the float32 sums of the survey are off
_WARPS = 16
_BLOCK = 4096  # 8 logits a thread
_SEARCH_BLOCK = 1024  # depths a pass of the search reads at once; most rows leave fewer


class Filters(NamedTuple):
    """What each row keeps, on the device. A row that filters nothing has 0, 1.0, 0.0.

    Attributes:
        top_k: [B] int32; 0, negative or at least V keeps all
        top_p: [B] float32; 1.0 keeps all
        min_p: [B] float32, or float64 for the definition's very threshold; 0 keeps all
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@triton.jit
def _survey(  # type: ignore[no-untyped-def]
    row_ptr, vocab_size, peak, temperature, deepest, top_k, by_count, top_p, BLOCK: tl.constexpr
):
    """The mass of all that is no deeper than ``deepest``, and a depth that is deep enough.

    Few tokens should lie above that depth, yet top_k of them, or top_p of the mass.
    """
    # In logits, not in scaled logits: how many tokens are near does not change with temperature.
    unit = 1.0 / tl.maximum(temperature, 1e-6)
    depth_1 = tl.minimum(2.0 * unit, deepest)
    depth_2 = tl.minimum(5.0 * unit, deepest)
    depth_3 = tl.minimum(8.0 * unit, deepest)
    depth_4 = tl.minimum(11.0 * unit, deepest)
    depth_5 = tl.minimum(14.0 * unit, deepest)
    depth_6 = tl.minimum(18.0 * unit, deepest)
    total = tl.zeros([BLOCK], tl.float64)
    near_1 = tl.zeros([BLOCK], tl.float32)
    near_2 = tl.zeros([BLOCK], tl.float32)
    near_3 = tl.zeros([BLOCK], tl.float32)
    near_4 = tl.zeros([BLOCK], tl.float32)
    near_5 = tl.zeros([BLOCK], tl.float32)
    near_6 = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        depth = -scaled_logits(row_ptr, ids, vocab_size, peak, temperature)
        mass = tl.where(depth <= deepest, mass_below(depth), 0.0)
        total += mass.to(tl.float64)
        weight = tl.where(by_count, 1.0, mass)
        near_1 += tl.where(depth <= depth_1, weight, 0.0)
        near_2 += tl.where(depth <= depth_2, weight, 0.0)
        near_3 += tl.where(depth <= depth_3, weight, 0.0)
        near_4 += tl.where(depth <= depth_4, weight, 0.0)
        near_5 += tl.where(depth <= depth_5, weight, 0.0)
        near_6 += tl.where(depth <= depth_6, weight, 0.0)
    all_mass = tl.sum(total, 0)
    goal = tl.where(by_count, top_k.to(tl.float32), top_p * all_mass.to(tl.float32) * _MARGIN)
    reach = tl.where(tl.sum(near_6, 0) >= goal, depth_6, deepest)
    reach = tl.where(tl.sum(near_5, 0) >= goal, depth_5, reach)
    reach = tl.where(tl.sum(near_4, 0) >= goal, depth_4, reach)
    reach = tl.where(tl.sum(near_3, 0) >= goal, depth_3, reach)
    reach = tl.where(tl.sum(near_2, 0) >= goal, depth_2, reach)
    reach = tl.where(tl.sum(near_1, 0) >= goal, depth_1, reach)
    return all_mass, reach


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    row_ptr, vocab_size, peak, temperature, reach, depths_ptr, BLOCK: tl.constexpr
):
    """Write the bits of all finite depths up to ``reach``, in the order of ids; their number."""
    num_depths = 0
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        # 0.0 minus it, not its negative: the peak has depth 0.0, whose bits are 0, not -0.0
        depth = 0.0 - scaled_logits(row_ptr, ids, vocab_size, peak, temperature)
        chosen = (depth <= reach) & (depth < float("inf"))
        count = tl.sum(chosen.to(tl.int32), 0)
        if count > 0:
            place = num_depths + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(depths_ptr + place, depth.to(tl.int32, bitcast=True), mask=chosen)
        num_depths += count
    tl.debug_barrier()  # what one thread wrote, others read
    return num_depths


@triton.jit
def _divide(  # type: ignore[no-untyped-def]
    depths_ptr, num_depths, pivot, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Weight up to and including the pivot, the last depth of that side, the first beyond."""
    weight = tl.zeros([BLOCK], tl.float64)
    last = tl.zeros([BLOCK], tl.int32)
    first = tl.full([BLOCK], _BEYOND, tl.int32)
    for start in range(0, num_depths, BLOCK):
        place = start + tl.arange(0, BLOCK)
        depth = tl.load(depths_ptr + place, mask=place < num_depths, other=_BEYOND)
        inside = depth <= pivot
        if BY_COUNT:
            weight += inside.to(tl.float64)
        else:
            mass = mass_below(depth.to(tl.float32, bitcast=True))
            weight += tl.where(inside, mass, 0.0).to(tl.float64)
        last = tl.maximum(last, tl.where(inside, depth, 0))
        first = tl.minimum(first, tl.where(inside, _BEYOND, depth))
    return tl.sum(weight, 0), tl.max(last, 0), tl.min(first, 0)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    depths_ptr, num_depths, deepest, goal, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Bits of the smallest depth that holds ``goal``; ``deepest`` if none does.

    Halves the range of bits and moves its ends to depths that exist: about log2 of their
    number of passes, 31 at most.
    """
    low = deepest * 0
    high = deepest
    while low < high:
        pivot = low + ((high - low) >> 1)
        weight, last, first = _divide(depths_ptr, num_depths, pivot, BY_COUNT, BLOCK)
        reached = weight >= goal
        high = tl.where(reached, last, high)
        low = tl.where(reached, low, tl.minimum(first, high))
    return high


@triton.jit
def _filter_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    peak_keys_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floors_ptr,
    depths_ptr,
    depths_stride,
    vocab_size,
    splits,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row).to(tl.float64)
    peak = key_value(best_key(peak_keys_ptr, row, splits))
    row_ptr = logits_ptr + row * row_stride
    depths_ptr += row * depths_stride
    by_count = (top_k > 0) & (top_k < vocab_size)
    by_mass = top_p < 1.0
    lowest = -tl.log(tl.where(min_p > 0.0, min_p, 1.0)).to(tl.float32)
    deepest = tl.where(min_p > 0.0, lowest, float("inf"))
    # A row whose peak is not finite ends in an error, and a greedy row needs no floor.
    if (by_count | by_mass) & (temperature > 0.0) & (tl.abs(peak) < float("inf")):
        total, reach = _survey(
            row_ptr, vocab_size, peak, temperature, deepest, top_k, by_count, top_p, BLOCK
        )
        num_depths = _collect(row_ptr, vocab_size, peak, temperature, reach, depths_ptr, BLOCK)
        bound = (0.0 + reach).to(tl.int32, bitcast=True)
        if by_count:
            bound = _search(depths_ptr, num_depths, bound, top_k.to(tl.float64), True, SEARCH_BLOCK)
            total, _, _ = _divide(depths_ptr, num_depths, bound, False, SEARCH_BLOCK)
        if by_mass:
            goal = top_p.to(tl.float64) * total
            bound = _search(depths_ptr, num_depths, bound, goal, False, SEARCH_BLOCK)
        deepest = bound.to(tl.float32, bitcast=True)
    tl.store(floors_ptr + row, -deepest)


def find_floors(
    logits: Tensor, temperatures: Tensor, filters: Filters, floors: Tensor, workspace: Workspace
) -> None:
    """`filter_top` for logits whose ``workspace.peak_keys`` are filled."""
    rows, vocab_size = logits.shape
    room = workspace.depths.shape
    assert room[0] >= rows and room[1] >= vocab_size, "a workspace made with filters"
    _filter_kernel[(rows,)](
        logits,
        logits.stride(0),
        workspace.peak_keys,
        temperatures,
        *filters,
        floors,
        workspace.depths,
        workspace.depths.stride(0),
        vocab_size,
        tiling(rows, vocab_size)[0],
        BLOCK=_BLOCK,
        SEARCH_BLOCK=_SEARCH_BLOCK,
        num_warps=_WARPS,
    )


def filter_top(
    logits: Tensor,
    temperatures: Tensor,
    filters: Filters,
    out_floors: Tensor,
    *,
    workspace: Workspace | None = None,
) -> None:
    """The lowest scaled logit that each row keeps; -inf where it keeps all.

    Scaled means shifted by the row's maximum, then divided by the temperature, as the
    sampler does it. Order: min_p, then top_k, then top_p of the mass that is left; tokens
    tied with the last one kept are kept. Rows with temperature 0 may get any floor.

    Args:
        logits: [B, V] float32, float16 or bfloat16 with a dense last dimension
        temperatures: [B] float32
        out_floors: [B] float32, written
        workspace: of at least B rows, made with ``filters``; None allocates one.
    """
    rows, vocab_size = logits.shape
    if rows:
        workspace = workspace or make_workspace(rows, vocab_size, logits.device)
        find_peaks(logits, workspace)
        find_floors(logits, temperatures, filters, out_floors, workspace)
