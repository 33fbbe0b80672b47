"""Matrix products of up to 16 rows, bound by the weight stream, fused with what surrounds them.

Two kernels do everything, on the CUDA cores (up to about four rows) or the tensor cores.
Both take an RMS norm in front, and a gate, a residual or a rounding behind. Both may split
K; the last program to arrive then sums the parts in their order, so a result depends on
shape and configuration alone, never on timing. Products of one shape share a workspace:
they must follow one another, on one stream, and the first must run before a capture.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiny_vllm.ops.kernels.linear_kernels import dot_kernel, gemv_kernel

MAX_ROWS = 16

_KIND = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_TL_TYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Config(NamedTuple):
    """How a product is cut, and which kernel runs it.

    block_n: rows of the weight of one program, gate and up together.
    block_k: columns of one step, in 16-bit numbers; wider types take fewer.
    split: programs along K.
    warps: of a program.
    stages: steps loaded ahead through shared memory; 1 is through registers (gemv alone).
    dot: on the tensor cores.
    """

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int
    dot: bool


@cache
def config(out_features: int, in_features: int, rows: int) -> Config:
    """Choose the cut of a product; ``out_features`` counts gate and up both.

    Measured on an H200 with the shapes of a 1B model. One row: a program keeps all of K of 4
    or 8 weight rows in flight, 8 warps wide. Two rows: half as wide, except for a long K.
    Three or four: the same while the product is small, else the tensor cores. Above: 128
    weight rows a program where there are many, else 64 with K split until the GPU is full.
    """
    warps = min(8, max(1, triton.next_power_of_2(in_features) // 256))
    is_long = in_features > 4096
    if rows == 1:
        return Config(8 if is_long else 4, 256 * warps, 1, warps, 1, dot=False)
    if rows == 2:
        warps = warps if is_long else min(4, warps)
        return Config(4, 256 * warps, 1, warps, 1, dot=False)
    is_small = out_features <= 4096 and not is_long
    if rows <= 4 and is_small:
        warps = min(4, warps)
        return Config(8 if out_features > 2048 else 4, 256 * warps, 1, warps, 1, dot=False)
    if out_features >= 8192:
        return Config(128, 64, 1, 4, 4, dot=True)
    tiles, split = triton.cdiv(out_features, 64), 1
    while tiles * split < 128 and in_features >= 512 * split:
        split *= 2
    return Config(64, 128, split, 4, 4, dot=True)


# Configurations worth timing on a new GPU, where its shared memory can hold them (Triton
# raises OutOfResources else): all but two of those with dot take at most 99 KiB in 16 bits.
CANDIDATES = (
    *(Config(n, 256 * w, s, w, 1, False) for n in (4, 8) for w in (2, 4, 8) for s in (1, 2)),
    *(Config(n, 1024, s, 4, 4, False) for n in (4, 8, 16) for s in (1, 2, 4)),
    Config(8, 512, 1, 2, 4, False),
    Config(4, 2048, 1, 4, 1, False),
    Config(8, 2048, 1, 8, 3, False),
    Config(4, 2048, 1, 8, 3, False),
    *(Config(64, 128, s, 4, 4, True) for s in (1, 2, 4, 8)),
    *(Config(32, 128, s, 4, 5, True) for s in (1, 2, 4)),
    *(Config(32, 256, s, 4, 3, True) for s in (1, 2, 4)),
    *(Config(16, 256, s, 2, 4, True) for s in (1, 2)),
    *(Config(128, 64, s, 4, 4, True) for s in (1, 4, 8)),
    *(Config(64, 128, s, 4, 6, True) for s in (1, 4)),
)


@cache
def _workspace(device: torch.device, floats: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Partial sums and arrival counters of one shape, kept for good: graphs hold the address."""
    partial = torch.empty(max(floats, 1), dtype=torch.float32, device=device)
    return partial, torch.zeros(max(tiles, 1), dtype=torch.int32, device=device)


def _are_words(x: Tensor, weight: Tensor, norm: Tensor) -> bool:
    """True where 32-bit words divide every row and begin where the rows do."""
    size = weight.element_size()
    sizes = (x.shape[1] | x.stride(0) | weight.stride(0)) * size
    return (sizes | x.data_ptr() | weight.data_ptr() | norm.data_ptr()) % 4 == 0


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    add: bool = False,
    round_to: torch.dtype | None = None,
    cut: Config | None = None,
    pdl: bool = False,
) -> Tensor:
    rows, in_features = x.shape
    if rows == 0:
        return out
    if rows > MAX_ROWS:
        raise ValueError(f"skinny products take at most {MAX_ROWS} rows, got {rows}")
    cut = cut or config(weight.shape[0], in_features, rows)
    if not cut.dot and not _are_words(x, weight, weight if norm is None else norm):
        cut = config(weight.shape[0], in_features, MAX_ROWS)
    pdl = pdl and not cut.dot  # it keeps programs of the kernel before out (measured)
    size = weight.element_size()
    unit = 1 if cut.dot else 4 // size  # numbers in what the kernel counts in
    block_k = cut.block_k * 2 // (size * unit)
    span = triton.cdiv(in_features // unit, cut.split * block_k) * block_k
    tiles = triton.cdiv(weight.shape[0], cut.block_n)
    padded = max(triton.next_power_of_2(rows), 8 if cut.dot else 1)
    partial, counters = weight, weight  # not touched by a product in one part
    if cut.split > 1:
        floats = tiles * cut.split * padded * (cut.block_n + 1)
        partial, counters = _workspace(x.device, floats, tiles)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    kernel = dot_kernel if cut.dot else gemv_kernel
    kernel[(tiles, cut.split)](
        x,
        x if norm is None else norm,
        weight,
        x if bias is None else bias,
        out,
        partial,
        counters,
        x.stride(0) // unit,
        weight.stride(0) // unit,
        out.stride(0),
        rows,
        weight.shape[0] // 2 if gated else weight.shape[0],
        eps,
        IN=in_features // unit,
        SPAN=span,
        ROWS=padded,
        BLOCK_N=cut.block_n,
        BLOCK_K=block_k,
        SPLIT=cut.split,
        STAGES=cut.stages,
        KIND=_KIND[weight.dtype],
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        ADD=add,
        ROUND=_TL_TYPE[round_to or out.dtype],
        PDL=pdl,
        num_warps=cut.warps,
        **options,
    )
    return out


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    cut: Config | None = None,
    pdl: bool = False,
) -> Tensor:
    """rms_norm(x) W^T + b.

    Args:
        x: [T, in] with T <= 16 and a dense last dimension; rows may lie apart.
        norm_weight: [in], of the norm with ``eps`` in front.
        weight: [out, in] in the dtype of ``x``; ``bias``: [out].
        out: [T, out] to write to.
        cut: how to cut the product, in place of `config`'s choice.
        pdl: launch while the kernel before drains (Hopper; that one must allow it).

    Returns:
        [T, out], ``out`` if given.
    """
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, norm=norm_weight, eps=eps, bias=bias, cut=cut, pdl=pdl)


def norm_gated(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    out: Tensor | None = None,
    *,
    cut: Config | None = None,
    pdl: bool = False,
) -> Tensor:
    """silu(gate) * up of rms_norm(x), with ``weight`` [2 * I, in], gate rows then up rows.

    Returns [T, I]; the other arguments are those of `norm_linear`.
    """
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, norm=norm_weight, eps=eps, gated=True, cut=cut, pdl=pdl)


def linear_add_(
    hidden: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cut: Config | None = None,
    pdl: bool = False,
) -> Tensor:
    """hidden += x W^T + b, in place with one rounding.

    Args:
        hidden: [T, out], of the dtype of ``x``; must not share memory with ``x``.
        x: [T, in], T <= 16. The rest as in `norm_linear`.
    """
    return _launch(x, weight, hidden, bias=bias, add=True, cut=cut, pdl=pdl)


def norm_lm_head(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    out: Tensor | None = None,
    *,
    round_to: torch.dtype | None = None,
    cut: Config | None = None,
    pdl: bool = False,
) -> Tensor:
    """rms_norm(x) W^T in float32 [T, vocab], rounded to ``round_to`` first where given.

    The other arguments are those of `norm_linear`.
    """
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    return _launch(x, weight, out, norm=norm_weight, eps=eps, round_to=round_to, cut=cut, pdl=pdl)
