"""One transformer layer: pre-norm attention and a gated MLP, each with its residual.

Knows shapes and weights; how queries meet the KV cache is the caller's ``attend``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tiny_vllm.config import ModelConfig
from tiny_vllm.ops.linear import Linear
from tiny_vllm.ops.norm import rms_norm
from tiny_vllm.ops.rotary import RotaryEmbedding

# (layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d]) -> [T, heads, d]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class FusedAttend(Protocol):
    """As `Attend`, with the rotation and the norms of q and k inside."""

    positions: Tensor  # int [T]

    def attend_qkv(
        self,
        layer: int,
        qkv: Tensor,
        rotary: RotaryEmbedding,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        """qkv [T, (heads + 2 kv_heads) * d], norms (q, k, eps) -> [T, heads * d]."""
        ...


@dataclass(slots=True)
class DecoderLayer:
    """Weights of a layer, ready to run. ``qkv`` stacks the three projections by rows."""

    index: int
    config: ModelConfig
    rotary: RotaryEmbedding
    input_norm: Tensor
    qkv: Linear
    out: Linear
    post_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        eps = self.config.rms_norm_eps
        q, k, v = self._project(rms_norm(hidden, self.input_norm, eps), cos, sin)
        context = attend(self.index, q, k, v).reshape(hidden.shape[0], -1)
        hidden = self.out.plus(context, hidden)
        x = rms_norm(hidden, self.post_norm, eps)
        return self.down.plus(self.up.times(x, self.gate.silu(x)), hidden)

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        num_rotated = c.num_heads + c.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], num_rotated + c.num_kv_heads, c.head_dim)
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(qk[:, : c.num_heads], self.q_norm, c.rms_norm_eps)
            k = rms_norm(qk[:, c.num_heads :], self.k_norm, c.rms_norm_eps)
            return self.rotary.rotate(q, cos, sin), self.rotary.rotate(k, cos, sin), v
        qk = self.rotary.rotate(qk, cos, sin)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], v
