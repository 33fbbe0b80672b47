"""From a Hugging Face config to a ModelConfig: one small parser a family."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from tiny_vllm.config import ModelConfig
from tiny_vllm.errors import ModelLoadError
from tiny_vllm.models import llama, mistral, qwen2, qwen3

_PARSERS: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "LlamaForCausalLM": llama.parse_config,
    "MistralForCausalLM": mistral.parse_config,
    "Qwen2ForCausalLM": qwen2.parse_config,
    "Qwen3ForCausalLM": qwen3.parse_config,
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
)


def supported_architectures() -> list[str]:
    """Names as they stand in a config's ``architectures``."""
    return sorted(_PARSERS)


def parse_model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Turn a config.json dictionary into a ModelConfig.

    Raises:
        ModelLoadError: an unknown architecture, or a setting the decoder cannot honour.
    """
    names = hf_config.get("architectures") or ["(none given)"]
    if not isinstance(names, (list, tuple)) or not isinstance(names[0], str):
        raise ModelLoadError(f"the config's architectures must be a list of names, got {names!r}")
    name = names[0]
    parser = _PARSERS.get(name)
    if parser is None:
        near = difflib.get_close_matches(name, _PARSERS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ModelLoadError(
            f"architecture {name} is not supported{hint}; supported: "
            f"{', '.join(supported_architectures())}"
        )
    try:
        config = parser(hf_config)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelLoadError(f"the config of {name} has a value of a wrong kind: {error}") from None
    except KeyError as error:
        raise ModelLoadError(f"the config of {name} lacks the key {error}") from None
    _check_sizes(name, config)
    return config


def _check_sizes(name: str, config: ModelConfig) -> None:
    scaling = config.rope_scaling
    positive = {size: getattr(config, size) for size in _SIZES}
    if scaling is not None:
        positive["rope scaling factor"] = scaling.factor
        positive["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    for size, value in positive.items():
        if not value > 0:
            raise ModelLoadError(f"the config of {name} gives {size}={value}; it must be above 0")
    if config.head_dim % 2:
        raise ModelLoadError(f"the config of {name} gives head_dim={config.head_dim}: must be even")
