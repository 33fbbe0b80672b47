"""GGUF metadata as a Hugging Face config for the supported families.

Nothing that changes the computation is dropped in silence: what the decoder cannot do
(experts, partial rotary, other rope scalings) is an error that names the key.
"""

from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from tiny_vllm.weights.gguf_rope import rope_scaling_from_gguf
from tiny_vllm.weights.source import Config

# general.architecture -> (architectures[0], model_type)
FAMILIES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_STORED_DTYPES = {
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


def open_gguf(path: Path) -> GgufHeader:
    """Read and check the header: a supported architecture, all tensor data present.

    Raises:
        ModelLoadError: names the file and what was expected and found.
    """
    header = read_gguf_header(path)
    if header.architecture not in FAMILIES:
        raise ModelLoadError(
            f"{path} has architecture {header.architecture!r}; supported are {', '.join(FAMILIES)}"
        )
    if header.metadata.get(f"{header.architecture}.expert_count"):
        raise ModelLoadError(f"{path} is a mixture of experts; only dense models can be run")
    for tensor in header.tensors:
        end = tensor.offset + num_bytes(header, tensor)
        if end > header.size:
            raise ModelLoadError(
                f"{path} is truncated: tensor {tensor.name!r} ends at byte {end}, the file has "
                f"{header.size} bytes (expected at least {_expected_size(header)}); "
                "download it again"
            )
    return header


def num_bytes(header: GgufHeader, tensor: GgufTensor) -> int:
    """Bytes a tensor occupies in the file."""
    block, size = _block_size(header, tensor)
    elements = 1
    for length in tensor.shape:
        elements *= length
    if not tensor.shape or tensor.shape[-1] % block:
        raise ModelLoadError(
            f"{header.path} is corrupt: tensor {tensor.name!r} of shape {tensor.shape} does not "
            f"split into blocks of {block}"
        )
    return elements // block * size


def storage_type(header: GgufHeader, tensor: GgufTensor) -> GGMLQuantizationType:
    """The storage type of a tensor, as the gguf package names it."""
    try:
        return GGMLQuantizationType(tensor.type_id)
    except ValueError:
        raise ModelLoadError(
            f"{header.path}: tensor {tensor.name!r} has unknown storage type {tensor.type_id}; "
            "a newer gguf package may know it"
        ) from None


def _block_size(header: GgufHeader, tensor: GgufTensor) -> tuple[int, int]:
    return GGML_QUANT_SIZES[storage_type(header, tensor)]


def _expected_size(header: GgufHeader) -> int:
    return max(tensor.offset + num_bytes(header, tensor) for tensor in header.tensors)


class _Metadata:
    """Typed access to the keys of one architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, int) and value > 0:
            return value
        raise ModelLoadError(
            f"{self.header.path}: {self.header.architecture}.{key} is {value!r}; "
            "one whole number >= 1 for all layers is needed"
        )


def hf_config_from_gguf(header: GgufHeader) -> Config:
    """Translate the metadata of a supported GGUF file.

    Raises:
        ModelLoadError: a key that is missing or that the decoder cannot follow.
    """
    meta = _Metadata(header)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{header.path} lacks tensor 'token_embd.weight'")
    config = _shape_config(meta)
    config.update(_family_config(meta))
    config.update(_attention_config(meta, config["head_dim"]))
    config["vocab_size"] = shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    config["bos_token_id"] = header.metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = list(header.eos_token_ids())
    config["torch_dtype"] = _stored_dtype(header)
    return config


def _shape_config(meta: _Metadata) -> Config:
    heads = meta.integer("attention.head_count")
    hidden = meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    value_dim = meta.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise ModelLoadError(
            f"{meta.header.path}: keys of {head_dim} and values of {value_dim} per head; "
            "only equal lengths can be run"
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": meta.integer("context_length"),
        # float32 in the file; seven digits give back the decimal number it came from
        "rms_norm_eps": float(f"{meta.get('attention.layer_norm_rms_epsilon', 1e-6):.7g}"),
    }


def _family_config(meta: _Metadata) -> Config:
    """Family names; Mistral files call themselves llama and differ by their window."""
    architecture, model_type = FAMILIES[meta.header.architecture]
    window = meta.get("attention.sliding_window") or None
    if window and model_type == "llama":
        architecture, model_type = "MistralForCausalLM", "mistral"
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0,  # the window holds in every layer
    }


def _attention_config(meta: _Metadata, head_dim: int) -> Config:
    rotary = meta.integer("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ModelLoadError(
            f"{meta.header.path}: rotary embeddings on {rotary} of {head_dim} dimensions; "
            "only all of them can be run"
        )
    theta = float(meta.get("rope.freq_base", 10000.0))
    scaling = rope_scaling_from_gguf(meta.header, theta, head_dim)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _stored_dtype(header: GgufHeader) -> str:
    """The element type of the first layer's matrices; quantised ones become float32."""
    for tensor in header.tensors:
        if tensor.name == "blk.0.attn_q.weight":
            return _STORED_DTYPES.get(storage_type(header, tensor), "float32")
    return "float32"
