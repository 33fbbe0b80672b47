"""Qwen2 and Qwen2.5: biases on q, k, v, and an optional window in the upper layers."""

from collections.abc import Mapping
from typing import Any

from tiny_vllm.config import ModelConfig
from tiny_vllm.models.common import base_config


def window_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window fields; the first ``max_window_layers`` layers see everything."""
    if not hf.get("use_sliding_window") or not hf.get("sliding_window"):
        return {}
    return {
        "sliding_window": int(hf["sliding_window"]),
        "num_full_attention_layers": int(hf.get("max_window_layers", 0)),
    }


def parse_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen2ForCausalLM config."""
    return base_config(hf, qkv_bias=True, **window_settings(hf))
