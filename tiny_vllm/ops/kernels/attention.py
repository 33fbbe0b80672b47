"""Prefix-forest attention: query tiles against runs of KV blocks, merged by log-sum-exp.

The work is data: an item is one tile of query tokens and one range of key positions of one
block-table row, see `tiny_vllm.attention.items`. A persistent grid walks items x KV heads,
heads innermost, so that tiles of one run read it from the L2 cache together. A token that
met one item only has its result written by that item; the others are merged from partial
results in float32. The plain definition is `tiny_vllm.ops.attention`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiny_vllm.ops.kernels.launch import options, wait_for_earlier

OPEN_END = 2**31 - 1  # kv_end of a tail that grows with its request
_MERGE_PARTS = 16
MANY_TOKENS = 96  # they fill the GPU without a program for each head


@triton.jit
def _tile_of_keys(table_row, start, offs_n, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache slots of key positions start .. start + BLOCK_N, int64."""
    if BLOCK_SIZE % BLOCK_N == 0:  # one block holds the tile: a scalar look-up
        block = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + start % BLOCK_SIZE + offs_n
    position = start + offs_n
    blocks = tl.load(table_row + position // BLOCK_SIZE, mask=position < end, other=0)
    return blocks.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def _attend_tile(
    q, acc, row_max, row_sum, k_head, v_head, table_row, start, end, position, scale_log2,
    offs_n, offs_d, window,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the usual online softmax, in base 2."""
    slots = _tile_of_keys(table_row, start, offs_n, end, BLOCK_SIZE, BLOCK_N)
    k_at = k_head + slots[None, :] * HEAD_DIM + offs_d[:, None]
    v_at = v_head + slots[:, None] * HEAD_DIM + offs_d[None, :]
    if MASKED:  # slots past the end hold anything, NaN too
        inside = start + offs_n < end
        k = tl.load(k_at, mask=inside[None, :] & (offs_d < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=inside[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == offs_d.shape[0]:
        k, v = tl.load(k_at), tl.load(v_at)
    else:
        k = tl.load(k_at, mask=(offs_d < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
    if MASKED:
        key = start + offs_n
        seen = (key[None, :] <= position[:, None]) & (key < end)[None, :]
        seen &= key[None, :] > position[:, None] - window
        scores = tl.where(seen, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)  # rows that saw no key yet
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        safe_max = new_max
    probs = tl.exp2(scores - safe_max[:, None])
    decay = tl.exp2(row_max - safe_max)
    row_sum = row_sum * decay + tl.sum(probs, 1)
    acc = acc * decay[:, None] + tl.dot(probs.to(v.dtype), v, input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def _rotated(head_ptr, cos_ptr, sin_ptr, at, angle, partner, mask):
    """A head of q or k, rotated and rounded: x cos + (x with halves swapped) (signed sin)."""
    x = tl.load(head_ptr + at, mask=mask, other=0.0)
    swapped = tl.load(head_ptr + at + partner, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * cos + swapped * sin).to(x.dtype)


# The width of a block table is any number: not one kernel for each kind of number.
@triton.jit(do_not_specialize=["table_stride", "window"])
def _forest_kernel(
    q_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, out_ptr, part_out_ptr, part_lse_ptr,
    items_ptr, num_items_ptr, q_index_ptr, positions_ptr, part_start_ptr, table_ptr,
    q_stride, kv_head_stride, table_stride, scale_log2, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROTATE: tl.constexpr, COUNT: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    num_works = tl.load(num_items_ptr + COUNT) * KV_HEADS
    for work in range(tl.program_id(0), num_works, tl.num_programs(0)):
        head = work % KV_HEADS
        item = items_ptr + (work // KV_HEADS) * 8
        table_row = table_ptr + tl.load(item).to(tl.int64) * table_stride
        begin, end = tl.load(item + 1), tl.load(item + 2)
        q_begin, q_count = tl.load(item + 3), tl.load(item + 4)
        part, is_final = tl.load(item + 5), tl.load(item + 6)

        valid = offs_m < q_count * GROUP
        token = tl.load(q_index_ptr + q_begin + offs_m // GROUP, mask=valid, other=0).to(tl.int64)
        position = tl.load(positions_ptr + token, mask=valid, other=0).to(tl.int32)
        q_head = head * GROUP + offs_m % GROUP
        at = (token * (KV_HEADS * GROUP) + q_head)[:, None] * HEAD_DIM + offs_d[None, :]
        mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
        q_at = (token * q_stride + q_head * HEAD_DIM)[:, None] + offs_d[None, :]
        if ROTATE:
            partner = tl.where(offs_d < HEAD_DIM // 2, HEAD_DIM // 2, -(HEAD_DIM // 2))
            angle = position.to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :]
            q = _rotated(q_ptr, cos_ptr, sin_ptr, q_at, angle, partner[None, :], mask)
        else:
            q = tl.load(q_ptr + q_at, mask=mask, other=0.0)

        first = tl.min(tl.where(valid, position, 2147483647), 0)
        last = tl.max(tl.where(valid, position, -1), 0)
        is_open = end == 2147483647
        if ROTATE:  # the newest key of the row is not stored yet: it is met below
            end = tl.minimum(end, last)
        else:
            end = tl.minimum(end, last + 1)
        full = tl.minimum(end, first + 1) - begin
        masked_from = begin + tl.maximum(full, 0) // BLOCK_N * BLOCK_N
        if WINDOWED:
            masked_from = begin
            begin = tl.maximum(begin, (first - window + 1) // BLOCK_N * BLOCK_N)
            masked_from = tl.maximum(begin, masked_from)
        k_head = k_ptr + head.to(tl.int64) * kv_head_stride
        v_head = v_ptr + head.to(tl.int64) * kv_head_stride
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(begin, masked_from, BLOCK_N):
            acc, row_max, row_sum = _attend_tile(
                q, acc, row_max, row_sum, k_head, v_head, table_row, start, end, position,
                scale_log2, offs_n, offs_d, window,
                BLOCK_SIZE, BLOCK_N, HEAD_DIM, False, PRECISION,
            )  # fmt: skip
        for start in range(masked_from, end, BLOCK_N):
            acc, row_max, row_sum = _attend_tile(
                q, acc, row_max, row_sum, k_head, v_head, table_row, start, end, position,
                scale_log2, offs_n, offs_d, window,
                BLOCK_SIZE, BLOCK_N, HEAD_DIM, True, PRECISION,
            )  # fmt: skip

        if ROTATE:
            if is_open:
                lane = offs_d < HEAD_DIM
                k_at = tl.min(tl.where(valid, token, 9223372036854775807), 0) * q_stride
                k_at += (KV_HEADS * GROUP + head) * HEAD_DIM + offs_d
                own_angle = last.to(tl.int64) * HEAD_DIM + offs_d
                key = _rotated(q_ptr, cos_ptr, sin_ptr, k_at, own_angle, partner, lane)
                value = tl.load(q_ptr + k_at + KV_HEADS * HEAD_DIM, mask=lane, other=0.0)
                block = tl.load(table_row + last // BLOCK_SIZE).to(tl.int64)
                slot_at = (block * BLOCK_SIZE + last % BLOCK_SIZE) * HEAD_DIM + offs_d
                tl.store(k_head + slot_at, key, mask=lane)
                tl.store(v_head + slot_at, value, mask=lane)
                score = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale_log2
                new_max = tl.maximum(row_max, score)
                prob, decay = tl.exp2(score - new_max), tl.exp2(row_max - new_max)
                row_sum = row_sum * decay + prob
                acc = acc * decay[:, None] + prob[:, None] * value.to(tl.float32)[None, :]
                row_max = new_max

        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        if is_final != 0:
            tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            slot = tl.load(part_start_ptr + token, mask=valid, other=0).to(tl.int64) + part
            flat = slot * (KV_HEADS * GROUP) + q_head
            tl.store(part_out_ptr + flat[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask)
            lse = tl.where(row_sum == 0.0, -float("inf"), row_max + tl.log2(row_sum))
            tl.store(part_lse_ptr + flat, lse, mask=valid)


@triton.jit
def _merge_kernel(
    part_out_ptr, part_lse_ptr, part_start_ptr, out_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a token and head; parts in order, so the sum does not depend on timing."""
    token, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(part_start_ptr + token)  # of the plan: older than the kernel before
    end = tl.load(part_start_ptr + token + 1)
    wait_for_earlier(PDL)
    if begin == end:  # written by its only item
        return
    offs_p = tl.arange(0, BLOCK_P)
    offs_d = tl.arange(0, BLOCK_D)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(begin, end, BLOCK_P):
        slot = (first + offs_p).to(tl.int64) * HEADS + head
        inside = first + offs_p < end
        lse = tl.load(part_lse_ptr + slot, mask=inside, other=-float("inf"))
        mask = inside[:, None] & (offs_d < HEAD_DIM)[None, :]
        parts = tl.load(part_out_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], mask, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp2(lse - safe)
        decay = tl.exp2(top - safe)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(weight[:, None] * parts, 0)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)
    at = (token.to(tl.int64) * HEADS + head) * HEAD_DIM + offs_d
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)


@triton.jit
def _merge_many_kernel(
    part_out_ptr, part_lse_ptr, part_start_ptr, out_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`_merge_kernel` for many tokens of few parts: a program takes several heads."""
    token = tl.program_id(0)
    begin = tl.load(part_start_ptr + token)
    end = tl.load(part_start_ptr + token + 1)
    wait_for_earlier(PDL)
    if begin == end:
        return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (head < HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]
    top = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for slot in range(begin, end):
        flat = slot * HEADS + head.to(tl.int64)
        lse = tl.load(part_lse_ptr + flat, mask=head < HEADS, other=-float("inf"))
        part = tl.load(part_out_ptr + flat[:, None] * HEAD_DIM + offs_d[None, :], mask, other=0.0)
        new_top = tl.maximum(top, lse)
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight, decay = tl.exp2(lse - safe), tl.exp2(top - safe)
        total = total * decay + weight
        acc = acc * decay[:, None] + weight[:, None] * part
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How a tile class is compiled and how many programs an SM holds."""

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def tile_config(
    block_m: int, head_dim: int, dtype: torch.dtype, capability: int, is_busy: bool = True
) -> TileConfig:
    """Measured choices for head_dim 64 in 16 bits on sm_90; smaller tiles where those spill.

    Args:
        block_m: query rows of the class, 16, 64 or 128.
        capability: 10 x major + minor of the GPU; 0 under the interpreter.
        is_busy: many more items than programs: bandwidth counts. Else the latency of one
            item counts, and deep prefetch in few programs is faster.
    """
    if dtype is torch.float32:
        warps = {16: 4, 64: 8, 128: 16}[block_m]
        return TileConfig(32 if head_dim <= 64 else 16, warps, 2, 1)
    large = capability >= 90
    if head_dim > 128:
        return TileConfig(32, 4 if block_m == 16 else 8, 2, 1)
    if head_dim > 64:
        stages = 3 if large else 2
        warps, programs = (8, 1) if block_m == 128 else (4, 2)
        return TileConfig(64 if large else 32, warps, stages, programs)
    if block_m == 16:
        if is_busy:
            return TileConfig(64, 4, 3, 6) if large else TileConfig(64, 4, 2, 4)
        return TileConfig(64, 4, 5 if large else 3, 2)
    if block_m == 64:
        return TileConfig(64, 4, 5 if large else 3, 3)
    return TileConfig(64, 4, 3, 2) if large else TileConfig(64, 8, 2, 1)


def max_tile_rows(head_dim: int, dtype: torch.dtype) -> int:
    """The widest class that fits the shared memory of all GPUs since Ampere without spills.

    Read off code compiled for sm_80, sm_86, sm_89 and sm_90.
    """
    if head_dim <= 128:
        return 128
    return 16 if dtype is torch.float32 else 64


def forest_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    parts: tuple[Tensor, Tensor],
    items: Tensor,
    counts: Tensor,
    q_index: Tensor,
    positions: Tensor,
    part_start: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    block_size: int,
    block_m: int,
    class_index: int,
    num_programs: int,
    config: TileConfig,
    window: int | None = None,
    rotate: tuple[Tensor, Tensor] | None = None,
    pdl: bool = False,
) -> None:
    """Run the items of one tile class.

    Args:
        q: [T, heads, head_dim] with dense heads; tokens may lie apart.
        out: [T, heads, head_dim], contiguous; only tokens with a final item are written.
        k_cache, v_cache: one layer, [kv_heads, slots, head_dim].
        parts: float32 ([slots, heads, head_dim], [slots, heads]) partial results; the second
            is a log2-sum-exp.
        items: int32 [n, 8]; counts: int32 [classes] on the device, of which entry
            ``class_index`` says how many items there are, at most n.
        q_index: int32 [Q]; positions: int64 [T]; part_start: int32 [T + 1].
        block_table: int32 [rows, blocks].
        num_programs: size of the persistent grid.
        window: tokens a query looks back, itself included.
        rotate: (cos, signed sin), [positions, head_dim]: a decoding batch whose ``q`` is the
            head of each token's unrotated [heads + 2 * kv_heads, head_dim] projections. The
            item with the open end then stores the newest key and value of its row.
        pdl: see `tiny_vllm.ops.kernels.launch`.
    """
    kv_heads, head_dim = k_cache.shape[0], k_cache.shape[2]
    cos, sin = (q, q) if rotate is None else rotate
    _forest_kernel[(num_programs,)](
        q, cos, sin, k_cache, v_cache, out, parts[0], parts[1],
        items, counts, q_index, positions, part_start, block_table,
        q.stride(0), k_cache.stride(0), block_table.stride(0),
        scale * 1.4426950408889634, window or OPEN_END,
        KV_HEADS=kv_heads, GROUP=q.shape[1] // kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_SIZE=block_size, BLOCK_M=block_m,
        BLOCK_N=config.block_n, ROTATE=rotate is not None,
        COUNT=class_index, WINDOWED=window is not None,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        PDL=pdl, num_warps=config.num_warps, num_stages=config.num_stages, **options(pdl),
    )  # fmt: skip


def merge_parts(
    parts: tuple[Tensor, Tensor], part_start: Tensor, out: Tensor, *, pdl: bool = False
) -> None:
    """Merge the partial results of tokens that have several; others are left alone.

    Args:
        parts: see `forest_attention`.
        part_start: int32 [T + 1], slots of token t are [part_start[t], part_start[t + 1]).
        out: [T, heads, head_dim].
    """
    num_tokens, heads, head_dim = out.shape
    padded = triton.next_power_of_2(head_dim)
    if num_tokens >= MANY_TOKENS:
        block_h = min(triton.next_power_of_2(heads), max(1, 1024 // padded))
        _merge_many_kernel[(num_tokens, triton.cdiv(heads, block_h))](
            parts[0], parts[1], part_start, out,
            HEADS=heads, HEAD_DIM=head_dim, BLOCK_D=padded, BLOCK_H=block_h, PDL=pdl,
            num_warps=4, **options(pdl),
        )  # fmt: skip
        return
    _merge_kernel[(num_tokens, heads)](
        parts[0], parts[1], part_start, out,
        HEADS=heads, HEAD_DIM=head_dim, BLOCK_D=padded,
        BLOCK_P=_MERGE_PARTS, PDL=pdl, num_warps=2 if head_dim <= 64 else 4, **options(pdl),
    )  # fmt: skip
