"""The decoder layer in few kernels, for a GPU. `DecoderLayer` is the plain twin.

A few rows run through products that are bound by the weight stream and fused with the
norms, the gate and the residual; many rows go to cuBLAS, which adds the residual while it
writes, with Triton kernels for the element-wise steps between. Owns no weights of its own: gate and
up of a plain layer are neighbours in memory and are read as one matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiny_vllm.layers.decoder_layer import DecoderLayer, FusedAttend
from tiny_vllm.ops.kernels.activation import silu_mul
from tiny_vllm.ops.kernels.launch import use_pdl
from tiny_vllm.ops.kernels.linear import linear_add_, norm_gated, norm_linear, norm_lm_head
from tiny_vllm.ops.kernels.norm import rms_norm
from tiny_vllm.ops.linear import Linear
from tiny_vllm.ops.rotary import RotaryEmbedding

MAX_SKINNY_ROWS = 16  # of the fused products


class FusedLayer:
    """One layer; ``hidden`` is updated in place."""

    def __init__(self, plain: DecoderLayer) -> None:
        self._index, self._eps = plain.index, plain.config.rms_norm_eps
        self._input_norm, self._post_norm = plain.input_norm, plain.post_norm
        self._qkv, self._out, self._down = plain.qkv, plain.out, plain.down
        self._gate_up = _rejoin(plain.gate, plain.up)
        self._pdl = use_pdl(plain.input_norm.device)
        self._norms = None
        if plain.q_norm is not None and plain.k_norm is not None:
            self._norms = (plain.q_norm, plain.k_norm, self._eps)

    def __call__(self, hidden: Tensor, rotary: RotaryEmbedding, attend: FusedAttend) -> None:
        """hidden [T, hidden] += attention, then += MLP."""
        if hidden.shape[0] <= MAX_SKINNY_ROWS and self._gate_up.bias is None:
            self._run_skinny(hidden, rotary, attend)
            return
        qkv = self._qkv(rms_norm(hidden, self._input_norm, self._eps, pdl=self._pdl))
        context = attend.attend_qkv(self._index, qkv, rotary, self._norms)
        _add_product(hidden, context, self._out)
        x = rms_norm(hidden, self._post_norm, self._eps, pdl=self._pdl)
        _add_product(hidden, silu_mul(self._gate_up(x), pdl=self._pdl), self._down)

    def _run_skinny(self, hidden: Tensor, rotary: RotaryEmbedding, attend: FusedAttend) -> None:
        eps, pdl = self._eps, self._pdl
        qkv, out, down = self._qkv, self._out, self._down
        projected = norm_linear(hidden, self._input_norm, eps, qkv.weight, qkv.bias, pdl=pdl)
        context = attend.attend_qkv(self._index, projected, rotary, self._norms)
        linear_add_(hidden, context, out.weight, out.bias, pdl=pdl)
        gated = norm_gated(hidden, self._post_norm, eps, self._gate_up.weight, pdl=pdl)
        linear_add_(hidden, gated, down.weight, down.bias, pdl=pdl)


class FusedDecoder:
    """All layers of a decoder and its output projection."""

    def __init__(
        self, layers: Sequence[DecoderLayer], final_norm: Tensor, head: Tensor, eps: float
    ) -> None:
        self.layers = [FusedLayer(layer) for layer in layers]
        self._final_norm, self._head, self._eps = final_norm, head, eps

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Final norm and output projection, never rounded: [N, hidden] -> float32 [N, vocab]."""
        if hidden.shape[0] <= MAX_SKINNY_ROWS:
            pdl = use_pdl(hidden.device)
            return norm_lm_head(hidden, self._final_norm, self._eps, self._head, out, pdl=pdl)
        hidden = rms_norm(hidden, self._final_norm, self._eps)
        if hidden.is_cuda and hidden.dtype is not torch.float32:
            return torch.mm(hidden, self._head.t(), out_dtype=torch.float32, out=out)
        logits = (hidden @ self._head.t()).float()
        return logits if out is None else out.copy_(logits)


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
