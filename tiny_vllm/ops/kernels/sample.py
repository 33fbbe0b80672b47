"""Sampling on the device: logits in, token ids out, and the state of a decode loop moved on.

The twin of `tiny_vllm.sampler.Sampler` without its edits and log-probabilities. Greedy ids
are equal always; the noise of a draw has the same integers, and the logarithms that torch
takes on the same device. A row's result does not depend on the batch.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tiny_vllm.ops.kernels.sample_filter import Filters, find_floors
from tiny_vllm.ops.kernels.sample_math import gumbel_noise, step_key, uniform_numbers
from tiny_vllm.ops.kernels.sample_peak import (
    MAX_SPLITS,
    TILE,
    Workspace,
    best_key,
    find_peaks,
    keep_better,
    key_id,
    key_value,
    make_workspace,
    order_key,
    scaled_logits,
    tiling,
)


class Advance(NamedTuple):
    """State of a decode loop that lives on the device, updated with each sampled token.

    Attributes:
        positions: [B] int64, each += 1; negative marks a padded row, which stays as it is
        token_ids: [B] int64, the sampled ids as the next step's input
    """

    positions: Tensor
    token_ids: Tensor


@triton.jit
def _race_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    peak_keys_ptr,
    race_keys_ptr,
    temperatures_ptr,
    seeds_ptr,
    num_outputs_ptr,
    floors_ptr,
    vocab_size,
    span,
    splits,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0.0:
        peak_key = best_key(peak_keys_ptr, row, splits)
        peak = key_value(peak_key)
        key_0, key_1 = step_key(tl.load(seeds_ptr + row), tl.load(num_outputs_ptr + row))
        # The peak itself runs with scaled logit 0: what cannot beat it needs no exact noise.
        rival = gumbel_noise(uniform_numbers(key_0, key_1, key_id(peak_key)))
        first = split * span
        lane = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_ids = first + lane
        for start in range(first, tl.minimum(first + span, vocab_size), BLOCK):
            ids = start + lane
            scaled = scaled_logits(
                logits_ptr + row * row_stride, ids, vocab_size, peak, temperature
            )
            if floors_ptr is not None:
                scaled = tl.where(scaled < tl.load(floors_ptr + row), float("-inf"), scaled)
            uniform = uniform_numbers(key_0, key_1, ids)
            # noise <= -log(uniform), so a winner has uniform <= exp(scaled - rival); 1 % covers
            # all rounding. NaN counts as alive. Most tiles hold nothing that is.
            alive = ~(uniform > tl.exp(scaled - rival + 0.01))
            if tl.max(alive.to(tl.int32), 0) > 0:
                best, best_ids = keep_better(best, best_ids, scaled + gumbel_noise(uniform), ids)
        key = tl.max(order_key(best, best_ids), 0)
        tl.store(race_keys_ptr + row * MAX_SPLITS + split, key)


@triton.jit(do_not_specialize=["splits"])
def _pick_kernel(  # type: ignore[no-untyped-def]
    peak_keys_ptr,
    race_keys_ptr,
    temperatures_ptr,
    num_outputs_ptr,
    positions_ptr,
    token_ids_ptr,
    out_ids_ptr,
    out_peaks_ptr,
    splits,
):
    row = tl.program_id(0).to(tl.int64)
    key = best_key(peak_keys_ptr, row, splits)
    tl.store(out_peaks_ptr + row, key_value(key))
    if race_keys_ptr is not None:
        drawn = tl.load(temperatures_ptr + row) > 0.0
        key = tl.where(drawn, best_key(race_keys_ptr, row, splits), key)
    token_id = key_id(key).to(tl.int64)
    tl.store(out_ids_ptr + row, token_id)
    if positions_ptr is not None:
        position = tl.load(positions_ptr + row)
        if position >= 0:
            tl.store(positions_ptr + row, position + 1)
            tl.store(token_ids_ptr + row, token_id)
            if num_outputs_ptr is not None:
                tl.store(num_outputs_ptr + row, tl.load(num_outputs_ptr + row) + 1)


def greedy(
    logits: Tensor,
    out_ids: Tensor,
    out_peaks: Tensor,
    *,
    advance: Advance | None = None,
    workspace: Workspace | None = None,
) -> None:
    """The arg-max of each row, ties to the lowest id; NaN counts as the maximum. Two kernels.

    Args:
        logits: [B, V] float32, float16 or bfloat16 with a dense last dimension
        out_ids: [B] int64, written
        out_peaks: [B] float32, written: the maxima, NaN where a row holds one
        advance: state to move on with the ids.
        workspace: of at least B rows; None allocates one.
    """
    rows, vocab_size = logits.shape
    if not rows:
        return
    workspace = workspace or make_workspace(rows, vocab_size, logits.device, filters=False)
    find_peaks(logits, workspace)
    _pick_kernel[(rows,)](
        workspace.peak_keys,
        None,
        None,
        None,
        *(advance or (None, None)),
        out_ids,
        out_peaks,
        tiling(rows, vocab_size)[0],
        num_warps=1,
    )


def gumbel(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    num_outputs: Tensor,
    out_ids: Tensor,
    out_peaks: Tensor,
    *,
    filters: Filters | None = None,
    floors: Tensor | None = None,
    advance: Advance | None = None,
    workspace: Workspace | None = None,
) -> None:
    """Draw one token a row by a Gumbel race; greedy where the temperature is 0.

    Three kernels, four with ``filters``.

    Args:
        logits: [B, V] float32, float16 or bfloat16 with a dense last dimension
        temperatures: [B] float32
        seeds: [B] int64, any
        num_outputs: [B] int64, tokens the request has so far; += 1 with ``advance``
        out_ids: [B] int64, written
        out_peaks: [B] float32, written: the maximum logits, not finite where a row is broken
        filters: what to keep of each row.
        floors: [B] float32, instead of ``filters``: what `filter_top` found for these logits.
        advance: state to move on with the ids; padded rows keep their ``num_outputs`` too.
        workspace: of at least B rows; None allocates one.
    """
    rows, vocab_size = logits.shape
    if not rows:
        return
    workspace = workspace or make_workspace(
        rows, vocab_size, logits.device, filters=filters is not None
    )
    find_peaks(logits, workspace)
    if filters is not None:
        floors = workspace.floors
        find_floors(logits, temperatures, filters, floors, workspace)
    splits, span = tiling(rows, vocab_size)
    _race_kernel[(rows, splits)](
        logits,
        logits.stride(0),
        workspace.peak_keys,
        workspace.race_keys,
        temperatures,
        seeds,
        num_outputs,
        floors,
        vocab_size,
        span,
        splits,
        BLOCK=TILE,
    )
    _pick_kernel[(rows,)](
        workspace.peak_keys,
        workspace.race_keys,
        temperatures,
        num_outputs,
        *(advance or (None, None)),
        out_ids,
        out_peaks,
        splits,
        num_warps=1,
    )
