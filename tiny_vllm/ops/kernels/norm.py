"""Root-mean-square norm, one program a row.

The twin of `tiny_vllm.ops.norm.rms_norm`: float32 inside, rounded once at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiny_vllm.ops.kernels.launch import options, wait_for_earlier


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    out_stride,
    hidden,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
    tl.store(out_ptr + row * out_stride + column, (x * factor) * weight, mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, *, pdl: bool = False
) -> Tensor:
    """Scale each row to unit root mean square, then by ``weight``.

    Args:
        x: [T, H] with a dense last dimension; rows may lie apart.
        weight: [H].
        out: [T, H] to write to, in any dtype; may be ``x`` itself.
        pdl: see `tiny_vllm.ops.kernels.launch`.

    Returns:
        [T, H], ``out`` if given.
    """
    rows, hidden = x.shape
    if out is None:
        out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(hidden)
        # 8 to 16 elements a thread: one or two 16-byte loads in flight, no spills at 16384.
        warps = min(max(block // 256, 1), 16)
        _rms_norm_kernel[(rows,)](
            x, weight, out, x.stride(0), out.stride(0), hidden, eps, BLOCK=block, PDL=pdl,
            num_warps=warps, **options(pdl),
        )  # fmt: skip
    return out
