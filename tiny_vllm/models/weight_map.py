"""Names and shapes of a decoder's tensors, and the buffers they are loaded into.

Names are Hugging Face's, common to all supported families. Nothing missing, nothing
left over, nothing of another shape: each fault is an error that names the tensor.
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from tiny_vllm.config import ModelConfig
from tiny_vllm.errors import ModelLoadError

# Buffers that some checkpoints store although they follow from the config.
_DERIVED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor the model needs."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        _add_linear(shapes, f"{prefix}.self_attn.q_proj", q, hidden, config.qkv_bias)
        _add_linear(shapes, f"{prefix}.self_attn.k_proj", kv, hidden, config.qkv_bias)
        _add_linear(shapes, f"{prefix}.self_attn.v_proj", kv, hidden, config.qkv_bias)
        _add_linear(shapes, f"{prefix}.self_attn.o_proj", hidden, q, config.attention_out_bias)
        _add_linear(
            shapes, f"{prefix}.mlp.gate_proj", config.intermediate_size, hidden, config.mlp_bias
        )
        _add_linear(
            shapes, f"{prefix}.mlp.up_proj", config.intermediate_size, hidden, config.mlp_bias
        )
        _add_linear(
            shapes, f"{prefix}.mlp.down_proj", hidden, config.intermediate_size, config.mlp_bias
        )
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _add_linear(
    shapes: dict[str, tuple[int, ...]], name: str, rows: int, columns: int, bias: bool
) -> None:
    shapes[f"{name}.weight"] = (rows, columns)
    if bias:
        shapes[f"{name}.bias"] = (rows,)


class DecoderWeights:
    """Tensors by name in the compute dtype, on the device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self._expected = expected_tensors(config)
        self._tensors: dict[str, Tensor] = {}

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take every tensor of an iterator.

        Raises:
            ModelLoadError: a tensor is missing, unexpected, given twice or mis-shaped.
        """
        for name, tensor in tensors:
            if _DERIVED.search(name) or self._is_tied_copy(name):
                continue
            self._check(name, tensor)
            # A fresh copy: a view would keep a whole memory-mapped file alive.
            self._tensors[name] = torch.empty(
                tensor.shape, dtype=self.dtype, device=self.device
            ).copy_(tensor)
        missing = [name for name in self._expected if name not in self._tensors]
        if missing:
            raise ModelLoadError(
                f"{len(missing)} tensors are missing from the checkpoint: {', '.join(missing[:5])}"
            )

    def _is_tied_copy(self, name: str) -> bool:
        return self.config.tie_word_embeddings and name == "lm_head.weight"

    def _check(self, name: str, tensor: Tensor) -> None:
        shape = self._expected.get(name)
        if shape is None:
            raise ModelLoadError(
                f"the checkpoint holds tensor {name!r}, which {self.config.architecture} "
                "does not use"
            )
        if name in self._tensors:
            raise ModelLoadError(f"the checkpoint holds tensor {name!r} twice")
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the config asks for {shape}"
            )

    def pop(self, name: str) -> Tensor:
        """Hand over one tensor."""
        return self._tensors.pop(name)

    def pop_stacked(self, prefix: str, names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
        """Hand over the weights (and biases) of some projections, stacked by rows."""
        weights = [self.pop(f"{prefix}.{name}.weight") for name in names]
        biases = [self._tensors.pop(f"{prefix}.{name}.bias", None) for name in names]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        present = [b for b in biases if b is not None]
        return weight, torch.cat(present) if present else None
