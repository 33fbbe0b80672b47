"""The maximum of every row of logits, found by many programs a row.

Owns what the sampling kernels share: order keys, the scaled logits, the workspace. A key is
one int64 that sorts by value (NaN on top), then by the lowest token id; so the best of a row
does not depend on how the row is cut.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = tl.constexpr(128)  # programs a row at most, and keys a row in the workspace
TILE = 1024  # logits a tile, 8 a thread: one 16-byte load in bf16
_PROGRAMS = 2048  # about 16 programs of 4 warps on each of an H200's 132 SMs: all it can hold
_LOWEST = tl.constexpr(-(2**63 - 1))  # below every key
_MIN_TEMPERATURE = tl.constexpr(1e-6)  # the sampler's own bound


class Workspace(NamedTuple):
    """Scratch memory of the sampling kernels; calls on one stream may share it.

    Attributes:
        peak_keys, race_keys: [max_rows, MAX_SPLITS] int64
        floors: [max_rows] float32
        depths: [max_rows, vocab] int32; no rows where nothing is filtered
    """

    peak_keys: Tensor
    race_keys: Tensor
    floors: Tensor
    depths: Tensor


def make_workspace(
    max_rows: int, vocab_size: int, device: torch.device, *, filters: bool = True
) -> Workspace:
    """Allocate a workspace; without ``filters`` it takes 2 KiB a row, else 4 bytes a logit more."""
    keys = (max_rows, MAX_SPLITS.value)
    return Workspace(
        torch.empty(keys, dtype=torch.int64, device=device),
        torch.empty(keys, dtype=torch.int64, device=device),
        torch.empty(max_rows, dtype=torch.float32, device=device),
        torch.empty((max_rows if filters else 0, vocab_size), dtype=torch.int32, device=device),
    )


@triton.jit
def order_key(values, ids):  # type: ignore[no-untyped-def]
    """Keys of float32 ``values`` at int32 ``ids``."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(values != values, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def key_value(key):  # type: ignore[no-untyped-def]
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def key_id(key):  # type: ignore[no-untyped-def]
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def best_key(keys_ptr, row, splits):  # type: ignore[no-untyped-def]
    """The best key of a row over its splits."""
    split = tl.arange(0, MAX_SPLITS)
    keys = tl.load(keys_ptr + row * MAX_SPLITS + split, mask=split < splits, other=_LOWEST)
    return tl.max(keys, 0)


@triton.jit
def load_logits(row_ptr, ids, vocab_size):  # type: ignore[no-untyped-def]
    return tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def scaled_logits(row_ptr, ids, vocab_size, peak, temperature):  # type: ignore[no-untyped-def]
    """Logits shifted so that the row's maximum is 0, then divided as the sampler divides them."""
    shifted = load_logits(row_ptr, ids, vocab_size) - peak
    # Rounded to nearest: a plain division is an approximation on a GPU.
    return tl.div_rn(shifted, tl.maximum(temperature, _MIN_TEMPERATURE))


@triton.jit
def keep_better(best, best_ids, values, ids):  # type: ignore[no-untyped-def]
    """Lane by lane, the better of two: the larger one, NaN above all, the earlier if equal."""
    better = (values > best) | ((values != values) & (best == best))
    return tl.where(better, values, best), tl.where(better, ids, best_ids)


@triton.jit(do_not_specialize=["span"])
def _peak_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, row_stride, keys_ptr, vocab_size, span, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row_ptr = logits_ptr + row * row_stride
    first = split * span
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = first + lane
    for start in range(first, tl.minimum(first + span, vocab_size), BLOCK):
        ids = start + lane
        best, best_ids = keep_better(best, best_ids, load_logits(row_ptr, ids, vocab_size), ids)
    tl.store(keys_ptr + row * MAX_SPLITS + split, tl.max(order_key(best, best_ids), 0))


def tiling(rows: int, vocab_size: int) -> tuple[int, int]:
    """Programs a row and logits a program: enough programs to fill the GPU, and not many more."""
    tiles = triton.cdiv(vocab_size, TILE)
    tiles_each = triton.cdiv(tiles, min(MAX_SPLITS.value, triton.cdiv(_PROGRAMS, rows)))
    tiles_each += tiles_each % 2 if tiles_each > 1 else 0  # the peak kernel takes two at a time
    return triton.cdiv(tiles, tiles_each), tiles_each * TILE


def find_peaks(logits: Tensor, workspace: Workspace) -> None:
    """Fill ``workspace.peak_keys`` for the rows of ``logits``. [B, V], dense last dimension"""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and len(workspace.peak_keys) >= rows
    splits, span = tiling(rows, vocab_size)
    _peak_kernel[(rows, splits)](
        logits,
        logits.stride(0),
        workspace.peak_keys,
        vocab_size,
        span,
        BLOCK=min(span, 2 * TILE),  # two loads in flight a thread where a program has them
    )
