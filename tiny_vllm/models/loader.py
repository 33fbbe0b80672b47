"""From an EngineConfig to a decoder in memory: the one way both engines load a model."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm import hub
from tiny_vllm.config import DTYPE_BYTES, EngineConfig, ModelConfig, resolve
from tiny_vllm.errors import ModelLoadError
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.device import host_facts, tune_allocator
from tiny_vllm.models.registry import parse_model_config
from tiny_vllm.models.weight_map import DecoderWeights, expected_tensors
from tiny_vllm.protocol import EngineInfo
from tiny_vllm.weights import open_weights, read_config
from tiny_vllm.weights.dummy import dummy_tensors


@dataclass(slots=True)
class LoadedModel:
    """A decoder with the resolved settings it was built under."""

    config: EngineConfig
    model_config: ModelConfig
    decoder: Decoder
    files: hub.ModelFiles

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.config.dtype)

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.device)


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_model(config: EngineConfig) -> LoadedModel:
    """Find, check and load a model.

    Raises:
        ModelLoadError: the model cannot be found or read.
        ConfigError: the settings cannot work on this machine with this model.
    """
    files = hub.resolve_model(config.model, config.revision)
    model_config = parse_model_config(read_config(files, config.load_format))
    resolved = resolve(config, model_config, host_facts())
    if resolved.num_threads is not None and resolved.device == "cpu":
        torch.set_num_threads(resolved.num_threads)
        tune_allocator()
    weights = DecoderWeights(
        model_config, torch_dtype(resolved.dtype), torch.device(resolved.device)
    )
    weights.load(_tensors(files, resolved, model_config))
    assert resolved.max_model_len is not None
    decoder = Decoder(weights, resolved.max_model_len, fused=resolved.attention_backend == "triton")
    return LoadedModel(resolved, model_config, decoder, files)


def _tensors(
    files: hub.ModelFiles, config: EngineConfig, model: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    if config.load_format == "dummy":
        return dummy_tensors(expected_tensors(model), config.seed)
    if files.kind is hub.ModelKind.PRESET:
        raise ModelLoadError(
            f"model {config.model!r} is a shape without weights: add --load-format dummy, "
            "or name a folder, a .gguf file or a hub id"
        )
    return open_weights(files, config.load_format).tensors()


def engine_info(name: str, loaded: LoadedModel) -> EngineInfo:
    """Collect the figures that reports and the roofline need."""
    model, config = loaded.model_config, loaded.config
    shapes = expected_tensors(model)
    sizes = {key: _count(shape) for key, shape in shapes.items()}
    linear = sum(n for key, n in sizes.items() if key.startswith("model.layers") and "proj" in key)
    head = model.vocab_size * model.hidden_size
    embedding = 0 if model.tie_word_embeddings else sizes["model.embed_tokens.weight"]
    assert config.max_model_len is not None
    return EngineInfo(
        name=name,
        device=config.device,
        dtype=config.dtype,
        config=config.to_dict(),
        reasons=dict(config.reasons),
        num_parameters=sum(sizes.values()),
        weight_bytes=(sum(sizes.values()) - embedding) * DTYPE_BYTES[config.dtype],
        kv_bytes_per_token=model.kv_bytes_per_token(config.dtype),
        linear_flops_per_token=2 * linear,
        lm_head_flops_per_token=2 * head,
        attention_flops_per_context_token=4 * model.num_layers * model.num_heads * model.head_dim,
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len,
    )


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
