"""Matrix products of a layer, with the fusions a decoder needs: + residual, SiLU, x gate.

`Linear` is the plain definition. `PackedLinear` is its CPU twin: oneDNN keeps the
weight in its own blocked layout, so that no call pays for a reorder, and fuses the
element-wise tail. `make_linear` chooses; weights are loaded first and packed once.
"""

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x W^T + b, with W [out, in]. Subclasses change only the speed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return F.linear(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        """silu(x W^T + b)."""
        return F.silu(F.linear(x, self.weight, self.bias))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """(x W^T + b) * other, with ``other`` [T, out]."""
        return F.linear(x, self.weight, self.bias).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x W^T + b + other, with ``other`` [T, out]."""
        return F.linear(x, self.weight, self.bias).add_(other)


class PackedLinear(Linear):
    """The oneDNN twin: same products, weight in a blocked layout, tails fused."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        # Packed for one row: decode is bound by the weight stream, and the same
        # layout serves long chunks equally well (measured).
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight, 1), bias)
        self._product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
        self._binary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, self.bias, "none", [], "")

    def silu(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, self.bias, "swish", [], "")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, self.weight, self.bias, "mul")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, self.weight, self.bias, "add")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True where the oneDNN twin exists and is right for ``dtype``."""
    if device.type != "cpu" or os.environ.get("TINY_VLLM_PLAIN_LINEAR") == "1":
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the fastest `Linear` for a loaded weight; ``weight`` may be freed after."""
    kind = PackedLinear if can_pack(weight.dtype, weight.device) else Linear
    return kind(weight, bias)
