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


def supported_architectures() -> list[str]:
    """Names as they stand in a config's ``architectures``."""
    return sorted(_PARSERS)


def parse_model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Turn a config.json dictionary into a ModelConfig.

    Raises:
        ModelLoadError: an unknown architecture, or a setting the decoder cannot honour.
    """
    names = hf_config.get("architectures") or []
    name = names[0] if names else "(none given)"
    parser = _PARSERS.get(name)
    if parser is None:
        near = difflib.get_close_matches(name, _PARSERS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ModelLoadError(
            f"architecture {name} is not supported{hint}; supported: "
            f"{', '.join(supported_architectures())}"
        )
    try:
        return parser(hf_config)
    except KeyError as error:
        raise ModelLoadError(f"the config of {name} lacks the key {error}") from None
