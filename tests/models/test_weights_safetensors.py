"""Safetensors folders: one file, shards, and every way they can be incomplete."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.hub import resolve_model
from tiny_vllm.weights import open_weights, read_config

CONFIG = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "bos_token_id": 1}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (8, 4),
        "model.norm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def make_folder(path: Path, **config) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def make_sharded(path: Path) -> Path:
    folder = make_folder(path)
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors().items(), start=1):
        file = f"model-{number:05}-of-00003.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    return dict(open_weights(resolve_model(str(folder))).tensors())


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("file", ["model.safetensors", "other.safetensors"])
def test_single_file(tmp_path, dtype, file):
    expected = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    save_file(expected, make_folder(tmp_path) / file)
    assert_same(read(tmp_path), expected)


def test_shards(tmp_path):
    assert_same(read(make_sharded(tmp_path)), tensors())


def test_missing_shard_is_named_before_anything_is_read(tmp_path):
    folder = make_sharded(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"1 of 3 shards.*model-00002-of-00003\.safetensors"):
        open_weights(resolve_model(str(folder)))


def test_index_that_names_a_tensor_its_shard_lacks(tmp_path):
    folder = make_sharded(tmp_path)
    index = folder / "model.safetensors.index.json"
    stored = json.loads(index.read_text())
    stored["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(stored))
    with pytest.raises(ModelLoadError, match=r"model-00001.*lacks tensor 'model\.extra\.weight'"):
        read(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_bad_index_is_named(tmp_path, content):
    folder = make_sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        read(folder)


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_file_is_named(tmp_path, keep):
    path = make_folder(tmp_path) / "model.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated or corrupt"):
        read(tmp_path)


def test_shards_without_index(tmp_path):
    folder = make_sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match="3 safetensors files and no"):
        read(folder)


def test_folder_without_weights(tmp_path):
    with pytest.raises(ModelLoadError, match="holds no safetensors weights"):
        open_weights(resolve_model(str(make_folder(tmp_path))))


def test_integer_weights_are_refused(tmp_path):
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, make_folder(tmp_path) / "model.safetensors")
    with pytest.raises(ModelLoadError, match="'w' is stored as torch.int8"):
        read(tmp_path)


def test_buffers_that_follow_from_the_config_are_left_out(tmp_path):
    stored = {**tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(stored, make_folder(tmp_path) / "model.safetensors")
    assert_same(read(tmp_path), tensors())


def test_eos_ids_of_both_config_files_are_joined(tmp_path):
    make_folder(tmp_path, eos_token_id=[2, 7])
    generation = {"eos_token_id": [9, 2], "bos_token_id": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = read_config(resolve_model(str(tmp_path)))
    assert config["eos_token_id"] == [9, 2, 7]
    assert config["bos_token_id"] == 1


@pytest.mark.parametrize("eos", ["x", {}, [1, "2"], 1.5, True])
def test_eos_of_another_kind_is_refused(tmp_path, eos):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelLoadError, match="eos_token_id=.* must be a token id"):
        read_config(resolve_model(str(tmp_path)), "auto")


def test_eos_is_a_list_even_when_unknown(tmp_path):
    make_folder(tmp_path, eos_token_id=None)
    assert read_config(resolve_model(str(tmp_path)))["eos_token_id"] == []


def test_config_faults_name_the_file(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        read_config(resolve_model(str(tmp_path)))
    make_folder(tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelLoadError, match=r"config\.json: weights quantised by awq"):
        read_config(resolve_model(str(tmp_path)))


def test_load_format_that_does_not_fit_is_refused(tmp_path):
    files = resolve_model(str(make_folder(tmp_path)))
    with pytest.raises(ModelLoadError, match="load_format='gguf'.*auto, safetensors, dummy"):
        open_weights(files, "gguf")
    assert read_config(files, "dummy")["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(ModelLoadError, match="--load-format dummy"):
        read_config(resolve_model("llama-3.2-1b"))
