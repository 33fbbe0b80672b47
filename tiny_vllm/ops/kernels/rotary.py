"""From the qkv projection to rotated queries and stored keys and values, in one kernel.

The twin of `tiny_vllm.ops.rotary` followed by a scatter into the cache, with Qwen3's
norm of each query and key head in front where a model has it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiny_vllm.ops.kernels.launch import options, wait_for_earlier

# Elements of one program: two 16-byte loads a thread with two warps. One token of a 1B
# model then takes three programs, and 32 of them on an SM keep 64 KiB in flight.
_TILE = 1024


@triton.jit(do_not_specialize=["table_stride"])  # its width is any number
def _rotary_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    positions_ptr,
    rows_ptr,
    table_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    qkv_stride,
    table_stride,
    angle_stride,
    k_head_stride,
    k_slot_stride,
    v_head_stride,
    v_slot_stride,
    out_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    live = position >= 0
    position = tl.maximum(position, 0)

    # Heads of q, k and v lie one after the other; a tile may hold heads of two kinds.
    # The halves of a head are loaded apart, so that the rotation needs no shuffle and
    # any even head_dim works.
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF_PADDED)[None, :]
    in_half = lane < HALF
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    mask = in_half & (head < NUM_HEADS + 2 * NUM_KV_HEADS)

    source = qkv_ptr + token * qkv_stride + head * HEAD_DIM + lane
    low = tl.load(source, mask=mask & live, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask & live, other=0.0).to(tl.float32)
    kept_low, kept_high = low, high  # v is stored as it came

    angle = position * angle_stride + lane
    cos_low = tl.load(cos_ptr + angle, mask=in_half, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + angle + HALF, mask=in_half, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + angle, mask=in_half, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + angle + HALF, mask=in_half, other=0.0).to(tl.float32)

    if HAS_NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM
        factor = tl.rsqrt(mean + eps)[:, None]
        q_low = tl.load(q_norm_ptr + lane, mask=in_half, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm_ptr + HALF + lane, mask=in_half, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm_ptr + lane, mask=in_half, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm_ptr + HALF + lane, mask=in_half, other=0.0).to(tl.float32)
        low = low * factor * tl.where(is_q, q_low, k_low)
        high = high * factor * tl.where(is_q, q_high, k_high)

    turned_low = low * cos_low + high * sin_low
    turned_high = high * cos_high + low * sin_high
    # With eps = 0 the norm of the zeros of a padded token is not a number.
    q_target = out_ptr + token * out_stride + head * HEAD_DIM + lane
    tl.store(q_target, tl.where(live, turned_low, 0.0), mask=mask & is_q)
    tl.store(q_target + HALF, tl.where(live, turned_high, 0.0), mask=mask & is_q)

    row = tl.load(rows_ptr + token, mask=live, other=0).to(tl.int64)
    entry = table_ptr + row * table_stride + position // BLOCK_SIZE
    slot = tl.load(entry, mask=live, other=0).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    is_k = live & mask & (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    k_head = (head - NUM_HEADS).to(tl.int64)
    k_target = k_cache_ptr + k_head * k_head_stride + slot * k_slot_stride + lane
    tl.store(k_target, turned_low, mask=is_k)
    tl.store(k_target + HALF, turned_high, mask=is_k)
    v_head = (head - NUM_HEADS - NUM_KV_HEADS).to(tl.int64)
    v_target = v_cache_ptr + v_head * v_head_stride + slot * v_slot_stride + lane
    tl.store(v_target, kept_low, mask=live & mask & is_v)
    tl.store(v_target + HALF, kept_high, mask=live & mask & is_v)


def rotary_store(
    qkv: Tensor,
    positions: Tensor,
    rows: Tensor,
    block_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    block_size: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Rotate q and k by position, store k and v in the cache, return q.

    Everything is computed in float32 and rounded once. A token goes to slot
    ``block_table[row, position // block_size] * block_size + position % block_size``.

    Args:
        qkv: [T, (num_heads + 2 * kv_heads) * D], dense last dimension; rows may lie apart.
        positions: int64 [T]; a negative one marks a padded token: its q is zeros, and
            nothing of it is stored (its row is not read).
        rows: int32 [T], the row of ``block_table`` that each token belongs to.
        block_table: int32 [R, W]; rows may lie apart.
        cos, sin: [max_positions, D], the sines signed as in `tiny_vllm.ops.rotary`.
        k_cache, v_cache: [kv_heads, num_slots, D] of one layer, dense last dimension.
        q_norm, k_norm: [D], both or neither: RMS norm of each q and k head before the
            rotation, with ``eps``.
        out: [T, num_heads, D] to write q to, contiguous within a token.
        pdl: see `tiny_vllm.ops.kernels.launch`.

    Returns:
        [T, num_heads, D], ``out`` if given.
    """
    tokens = qkv.shape[0]
    kv_heads, _, head_dim = k_cache.shape
    if out is None:
        out = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return out
    half = triton.next_power_of_2(head_dim // 2)
    heads = max(_TILE // (2 * half), 1)
    _rotary_store_kernel[(tokens, triton.cdiv(num_heads + 2 * kv_heads, heads))](
        qkv,
        positions,
        rows,
        block_table,
        cos,
        sin,
        k_cache,
        v_cache,
        qkv if q_norm is None else q_norm,  # not read without a norm
        qkv if k_norm is None else k_norm,
        out,
        qkv.stride(0),
        block_table.stride(0),
        cos.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        out.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_NORM=q_norm is not None and k_norm is not None,
        HEADS=heads,
        HALF_PADDED=half,
        PDL=pdl,
        num_warps=2,
        **options(pdl),
    )
    return out
