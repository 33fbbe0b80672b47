"""Rotary position embedding (Su et al., 2021) in the half-split form of the Llama family.

The sine table carries the sign of the rotation, so that applying it is one roll, one
product and one fused multiply-add, whatever the number of heads.
"""

import math

import torch
from torch import Tensor

from tiny_vllm.config import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the rotation speeds, float32 [head_dim / 2], in radians per position."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    freq = 1.0 / theta**exponent
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    return _llama3(freq, scaling)


def _llama3(freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: slow the long waves by ``factor``, keep the short ones, blend between."""
    wavelength = 2 * math.pi / freq
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return freq * (blend + (1.0 - blend) / scaling.factor)


class RotaryEmbedding:
    """Tables of cosines and signed sines for every position, in the compute dtype."""

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        scaling: RopeScaling | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        freq = inverse_frequencies(head_dim, theta, scaling)
        angle = torch.outer(torch.arange(max_positions, dtype=torch.float32), freq)
        cos, sin = angle.cos(), angle.sin()  # [max_positions, head_dim / 2]
        self._half = head_dim // 2
        self._cos = torch.cat((cos, cos), -1).to(device, dtype).unsqueeze(1)
        self._sin = torch.cat((-sin, sin), -1).to(device, dtype).unsqueeze(1)

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, signed sin) of ``positions`` [T], each [T, 1, head_dim]."""
        return self._cos[positions], self._sin[positions]

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """(cos, signed sin) of every position, each [max_positions, head_dim]."""
        return self._cos.squeeze(1), self._sin.squeeze(1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``x`` [T, heads, head_dim] by the angles that `gather` returned."""
        return torch.addcmul(x * cos, x.roll(self._half, -1), sin)
