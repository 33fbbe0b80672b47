"""The decoder layer in few kernels, for a GPU. `DecoderLayer` is the plain twin.

Matrix products of many rows go to cuBLAS, which adds the residual while it writes; the
element-wise steps between them are Triton kernels. Owns no weights of its own: gate and
up of a plain layer are neighbours in memory and are read as one matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiny_vllm.layers.decoder_layer import DecoderLayer, FusedAttend
from tiny_vllm.ops.kernels.activation import silu_mul
from tiny_vllm.ops.kernels.norm import rms_norm
from tiny_vllm.ops.linear import Linear
from tiny_vllm.ops.rotary import RotaryEmbedding


class FusedLayer:
    """One layer; ``hidden`` is updated in place."""

    def __init__(self, plain: DecoderLayer) -> None:
        self._index, self._eps = plain.index, plain.config.rms_norm_eps
        self._input_norm, self._post_norm = plain.input_norm, plain.post_norm
        self._qkv, self._out, self._down = plain.qkv, plain.out, plain.down
        self._gate_up = _rejoin(plain.gate, plain.up)
        self._norms = None
        if plain.q_norm is not None and plain.k_norm is not None:
            self._norms = (plain.q_norm, plain.k_norm, self._eps)

    def __call__(self, hidden: Tensor, rotary: RotaryEmbedding, attend: FusedAttend) -> None:
        """hidden [T, hidden] += attention, then += MLP."""
        qkv = self._qkv(rms_norm(hidden, self._input_norm, self._eps))
        context = attend.attend_qkv(self._index, qkv, rotary, self._norms)
        _add_product(hidden, context, self._out)
        gate_up = self._gate_up(rms_norm(hidden, self._post_norm, self._eps))
        _add_product(hidden, silu_mul(gate_up), self._down)


class FusedDecoder:
    """All layers of a decoder."""

    def __init__(self, layers: Sequence[DecoderLayer], final_norm: Tensor, head: Tensor) -> None:
        self.layers = [FusedLayer(layer) for layer in layers]
        self._final_norm, self._head = final_norm, head


def _add_product(hidden: Tensor, x: Tensor, linear: Linear) -> None:
    hidden.addmm_(x, linear.weight.t())
    if linear.bias is not None:
        hidden.add_(linear.bias)


def _rejoin(gate: Linear, up: Linear) -> Linear:
    """Gate above up, as they lie in memory."""
    half = gate.weight
    assert up.weight.data_ptr() == half.data_ptr() + half.numel() * half.element_size()
    rows, columns = half.shape
    weight = half.as_strided((2 * rows, columns), (columns, 1))
    bias = None
    if gate.bias is not None and up.bias is not None:
        bias = torch.cat((gate.bias, up.bias))
    return Linear(weight, bias)
