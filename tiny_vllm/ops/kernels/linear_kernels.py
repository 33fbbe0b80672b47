"""Kernels of `tiny_vllm.ops.kernels.linear`: a norm, a product of few rows, an epilogue.

A program owns BLOCK_N rows of the weight and, where K is split, a part of K.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _weight_rows(tile, outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of the weight that a program reads; past the end, the last one again."""
    n = tl.arange(0, BLOCK_N)
    if GATED:  # the first half of the tile is gate, the second the up rows that go with it
        half: tl.constexpr = BLOCK_N // 2
        row = tl.minimum(tile * half + n % half, outputs - 1) + n // half * outputs
    else:
        row = tl.minimum(tile * BLOCK_N + n, outputs - 1)
    return row.to(tl.int64)


@triton.jit
def _sum_parts(  # type: ignore[no-untyped-def]
    total,  # [ROWS, BLOCK_N]
    squares,  # [ROWS, 1]
    partial_ptr,  # float32 [tiles, SPLIT, ROWS, BLOCK_N], then [tiles, SPLIT, ROWS]
    counter_ptr,  # int32 [tiles], zeros between launches
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Publish the sums of a part; the last to arrive returns all of them, in order of K."""
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)[:, None]
    cell = partial_ptr + tile * SPLIT * ROWS * BLOCK_N + row * BLOCK_N + tl.arange(0, BLOCK_N)
    square = partial_ptr + tl.num_programs(0) * SPLIT * ROWS * BLOCK_N + tile * SPLIT * ROWS + row
    tl.store(cell + part * ROWS * BLOCK_N, total)
    tl.store(square + part * ROWS, squares)
    tl.debug_barrier()  # every thread has stored before one of them counts
    arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
    last = arrived == SPLIT - 1
    tl.debug_barrier()
    if last:
        total = tl.zeros_like(total)
        squares = tl.zeros_like(squares)
        for index in tl.static_range(SPLIT):
            total += tl.load(cell + index * ROWS * BLOCK_N, cache_modifier=".cg")
            squares += tl.load(square + index * ROWS, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)  # ready for the next launch
    return total, squares, last


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    total,  # [ROWS, BLOCK_N]
    squares,  # [ROWS, 1]
    bias_ptr,
    out_ptr,
    out_stride,
    rows,
    outputs,
    eps,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Norm factor, gate or bias, residual, and one rounding."""
    tile = tl.program_id(0)
    if HAS_NORM:
        total = total * tl.rsqrt(squares / IN + eps)
    width: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, width)), (0, 2, 1)))
        total = gate * tl.sigmoid(gate) * up
    n = (tile * width + tl.arange(0, width))[None, :]
    row = tl.arange(0, ROWS)[:, None]
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
    target = out_ptr + row.to(tl.int64) * out_stride + n
    inside = (row < rows) & (n < outputs)
    if ADD:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(ROUND), mask=inside)


@triton.jit
def _low(word, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first number in a 32-bit word, as float32; the only one where KIND is fp32."""
    if KIND == "bf16":
        return (word << 16).to(tl.float32, bitcast=True)
    if KIND == "fp16":
        return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _high(word, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The second number in a 32-bit word."""
    if KIND == "bf16":
        return (word & -65536).to(tl.float32, bitcast=True)
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _gemv_step(  # type: ignore[no-untyped-def]
    acc, squares, x_at, norm_at, w, present, inside, KIND: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Add the products of one weight tile, and the squares of x beside them."""
    x = tl.load(x_at, mask=present & inside, other=0)
    low, high = _low(x, KIND), 0.0
    if KIND != "fp32":
        high = _high(x, KIND)
    if HAS_NORM:
        norm = tl.load(norm_at, mask=inside, other=0)
        squares += tl.sum(low * low, 3)
        low *= _low(norm, KIND)
        if KIND != "fp32":
            squares += tl.sum(high * high, 3)
            high *= _high(norm, KIND)
    acc += tl.sum(low * _low(w, KIND), 3)
    if KIND != "fp32":
        acc += tl.sum(high * _high(w, KIND), 3)
    return acc, squares


@triton.jit(do_not_specialize=["rows"])
def gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    x_stride,
    weight_stride,
    out_stride,
    rows,
    outputs,
    eps,
    IN: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles are [lane, ROWS, BLOCK_N, word of a 16-byte vector], a word one or two numbers.

    The last axis is summed within a thread at each step, the lanes once at the end. Words,
    because to widen one takes one instruction, and numbers carried from step to step would
    be unpacked, so waited for, too early. Lanes come first because the compiler then spreads
    all threads over them, for x and the weight alike, and nothing moves between threads.
    IN, SPAN, BLOCK_K and the strides of x and the weight count words.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    LANES: tl.constexpr = BLOCK_K // 4
    EVEN: tl.constexpr = SPAN * SPLIT == IN
    NUMBERS: tl.constexpr = IN if KIND == "fp32" else 2 * IN
    k = part * SPAN + tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    k = k[:, None, None, :]
    source = _weight_rows(tile, outputs, BLOCK_N, GATED)[None, None, :, None]
    weight_at = weight_ptr.to(tl.pointer_type(tl.int32)) + source * weight_stride + k
    row = tl.arange(0, ROWS)[None, :, None, None]
    x_at = x_ptr.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * x_stride + k
    norm_at = norm_ptr.to(tl.pointer_type(tl.int32)) + k

    acc = tl.zeros((LANES, ROWS, BLOCK_N), tl.float32)
    squares = tl.zeros((LANES, ROWS, 1), tl.float32)
    present = row < rows
    if STAGES == 1:
        inside = EVEN | (k < IN)
        w = tl.load(weight_at, mask=inside, other=0, eviction_policy="evict_first")
        if PDL:  # the weight does not depend on the kernel before
            gdc_wait()
            gdc_launch_dependents()
        for at in tl.range(BLOCK_K, SPAN, BLOCK_K, num_stages=1):
            next_inside = EVEN | (at + k < IN)
            ahead = tl.load(
                weight_at + at, mask=next_inside, other=0, eviction_policy="evict_first"
            )
            acc, squares = _gemv_step(
                acc, squares, x_at, norm_at, w, present, inside, KIND, HAS_NORM
            )
            w, inside = ahead, next_inside
            x_at += BLOCK_K
            norm_at += BLOCK_K
        acc, squares = _gemv_step(acc, squares, x_at, norm_at, w, present, inside, KIND, HAS_NORM)
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        for at in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
            inside = EVEN | (at + k < IN)
            w = tl.load(weight_at + at, mask=inside, other=0, eviction_policy="evict_first")
            acc, squares = _gemv_step(
                acc, squares, x_at + at, norm_at + at, w, present, inside, KIND, HAS_NORM
            )
    total, squares = tl.sum(acc, 0), tl.sum(squares, 0)
    done = True
    if SPLIT > 1:
        total, squares, done = _sum_parts(
            total, squares, partial_ptr, counter_ptr, ROWS, BLOCK_N, SPLIT
        )
    if done:
        _finish(
            total, squares, bias_ptr, out_ptr, out_stride, rows, outputs, eps,
            NUMBERS, ROWS, BLOCK_N, HAS_NORM, HAS_BIAS, GATED, ADD, ROUND,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def dot_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    x_stride,
    weight_stride,
    out_stride,
    rows,
    outputs,
    eps,
    IN: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """The product is turned over, W x^T, so that the many rows of W fill the tensor cores."""
    tile, part = tl.program_id(0), tl.program_id(1)
    EVEN: tl.constexpr = SPAN * SPLIT == IN
    # tf32 keeps the 10 bits of an fp16 mantissa.
    PRECISION: tl.constexpr = "tf32" if KIND == "fp16" else "ieee"
    k = (part * SPAN + tl.arange(0, BLOCK_K))[None, :]
    source = _weight_rows(tile, outputs, BLOCK_N, GATED)
    weight_at = weight_ptr + source[:, None] * weight_stride + k
    row = tl.arange(0, ROWS)[:, None]
    x_at = x_ptr + row.to(tl.int64) * x_stride + k
    norm_at = norm_ptr + k

    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for at in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
        inside = EVEN | (at + k < IN)
        w = tl.load(weight_at + at, mask=inside, other=0.0)
        x = tl.load(x_at + at, mask=(row < rows) & inside, other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            wide *= tl.load(norm_at + at, mask=inside, other=0.0).to(tl.float32)
            if KIND == "fp16":  # x is not yet scaled, so fp16 might overflow
                x, w = wide, w.to(tl.float32)
            else:
                x = wide.to(w.dtype)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    total = tl.trans(acc)
    squares = tl.sum(squares, 1)[:, None]
    done = True
    if SPLIT > 1:
        total, squares, done = _sum_parts(
            total, squares, partial_ptr, counter_ptr, ROWS, BLOCK_N, SPLIT
        )
    if done:
        _finish(
            total, squares, bias_ptr, out_ptr, out_stride, rows, outputs, eps,
            IN, ROWS, BLOCK_N, HAS_NORM, HAS_BIAS, GATED, ADD, ROUND,
        )  # fmt: skip
