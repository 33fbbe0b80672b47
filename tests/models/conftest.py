"""Models on disk and baseline engines over them."""

import json

import pytest
import torch
from origin_models import LLAMA, settings
from safetensors.torch import save_file

from tiny_vllm.models.registry import parse_model_config
from tiny_vllm.models.weight_map import expected_tensors
from tiny_vllm.origin import OriginEngine


@pytest.fixture
def folder(tmp_path):
    """Writes a model with weights large enough for attention to decide the tokens."""

    def write(config=LLAMA):
        (tmp_path / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(3)
        tensors = {
            name: torch.ones(shape)
            if "norm" in name
            else torch.randn(shape, generator=generator) * 0.4
            for name, shape in expected_tensors(parse_model_config(config)).items()
        }
        save_file(tensors, tmp_path / "model.safetensors")
        return str(tmp_path)

    return write


@pytest.fixture
def build(folder):
    def make(config=LLAMA, **changes):
        return OriginEngine.build(settings(folder(config), **changes))

    return make
