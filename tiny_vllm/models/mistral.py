"""Mistral: Llama with a sliding attention window."""

from collections.abc import Mapping
from typing import Any

from tiny_vllm.config import ModelConfig
from tiny_vllm.models.common import base_config


def parse_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a MistralForCausalLM config; ``sliding_window`` null means full attention."""
    window = hf.get("sliding_window")
    return base_config(hf, sliding_window=int(window) if window else None)
