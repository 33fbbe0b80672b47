"""Llama 2 to 3.2 and SmolLM: the plain form of the decoder."""

from collections.abc import Mapping
from typing import Any

from tiny_vllm.config import ModelConfig
from tiny_vllm.models.common import base_config


def parse_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a LlamaForCausalLM config."""
    bias = bool(hf.get("attention_bias", False))
    return base_config(
        hf, qkv_bias=bias, attention_out_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False))
    )
