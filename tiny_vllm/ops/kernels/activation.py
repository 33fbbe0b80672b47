"""The gate of a Llama feed-forward layer, in one pass over its input."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiny_vllm.ops.kernels.launch import options, wait_for_earlier

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    x_stride,
    out_stride,
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_ptr = x_ptr + row * x_stride + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, gate * tl.sigmoid(gate) * up, mask=inside)


def silu_mul(x: Tensor, out: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up, in float32 and rounded once.

    Args:
        x: [T, 2 * I], gate then up, with a dense last dimension; rows may lie apart.
        out: [T, I] to write to.
        pdl: see `tiny_vllm.ops.kernels.launch`.

    Returns:
        [T, I], ``out`` if given.
    """
    rows, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows and width:
        grid = (rows, triton.cdiv(width, _BLOCK))  # rows first: that axis may exceed 65535
        _silu_mul_kernel[grid](
            x, out, x.stride(0), out.stride(0), width, BLOCK=_BLOCK, PDL=pdl,
            num_warps=4, **options(pdl),
        )  # fmt: skip
    return out
