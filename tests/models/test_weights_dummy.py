"""Random weights: the same for the same seed, different otherwise, of a usable size."""

import torch

from tiny_vllm.hub import resolve_model
from tiny_vllm.weights import dummy_tensors, read_config

SHAPES = {
    "model.embed_tokens.weight": (300, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.norm.weight": (64,),
}


def draw(seed: int, shapes=SHAPES, **options) -> dict[str, torch.Tensor]:
    return dict(dummy_tensors(shapes, seed, **options))


def test_names_shapes_and_scale():
    found = draw(0, dtype=torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == SHAPES
    embedding = found["model.embed_tokens.weight"]
    assert abs(embedding.std().item() - 0.02) < 0.001
    assert abs(embedding.mean().item()) < 0.001
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert abs(found[name].mean().item() - 1) < 0.02
    assert found["model.layers.0.self_attn.q_proj.bias"].abs().max() < 0.1


def test_seed_decides_and_order_does_not():
    first, again, other = draw(3), draw(3, dict(reversed(SHAPES.items()))), draw(4)
    for name in SHAPES:
        assert first[name].dtype == torch.bfloat16
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


def test_tensors_of_one_shape_differ():
    shapes = {"a.weight": (8, 8), "b.weight": (8, 8)}
    found = draw(0, shapes)
    assert not torch.equal(found["a.weight"], found["b.weight"])


def test_preset_config_is_a_copy():
    files = resolve_model("llama-3.2-1b")
    config = read_config(files, "dummy")
    config["vocab_size"] = 1
    assert read_config(files, "dummy")["vocab_size"] == 128256
