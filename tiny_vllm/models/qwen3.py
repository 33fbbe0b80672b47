"""Qwen3 (dense): RMS norm on each query and key head, no biases by default."""

from collections.abc import Mapping
from typing import Any

from tiny_vllm.config import ModelConfig
from tiny_vllm.models.common import base_config
from tiny_vllm.models.qwen2 import window_settings


def parse_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen3ForCausalLM config; ``head_dim`` is 128 unless given."""
    bias = bool(hf.get("attention_bias", False))
    return base_config(
        hf,
        qk_norm=True,
        head_dim=int(hf.get("head_dim") or 128),
        qkv_bias=bias,
        attention_out_bias=bias,
        **window_settings(hf),
    )
