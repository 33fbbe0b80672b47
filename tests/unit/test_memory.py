"""Sizing of the KV pool, with a stand-in for the GPU's memory."""

from types import SimpleNamespace

import pytest
import torch

from tests.unit.test_config import MODEL
from tiny_vllm.config import EngineConfig, HostFacts, resolve
from tiny_vllm.errors import ConfigError
from tiny_vllm.worker.memory import size_kv_pool

GIB = 1 << 30


def loaded(monkeypatch, free, **settings):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 8 * GIB))
    config = EngineConfig(block_size=16, dtype="float32", attention_backend="torch", **settings)
    return SimpleNamespace(config=config, model_config=MODEL, device=torch.device("cuda"))


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"num_blocks": 1_000_000_000}, "num_blocks=1000000000"),
        ({"kv_cache_memory_bytes": 5 * GIB}, "kv_cache_memory_bytes"),
    ],
)
def test_a_pool_larger_than_the_free_memory_is_refused(monkeypatch, settings, name) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* bytes of GPU memory are free; lower it"):
        size_kv_pool(loaded(monkeypatch, 4 * GIB, **settings))


def test_what_is_left_of_the_share_becomes_blocks(monkeypatch) -> None:
    model = loaded(monkeypatch, 6 * GIB, gpu_memory_utilization=0.75)
    size_kv_pool(model)
    block = MODEL.kv_bytes_per_token("float32") * 16
    # three quarters of 8 GiB, less 2 in use and 1 set aside
    assert model.config.num_blocks == 3 * GIB // block
    assert "gpu_memory_utilization" in model.config.reasons["num_blocks"]


def test_no_room_names_the_settings_to_change(monkeypatch) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        size_kv_pool(loaded(monkeypatch, 1 * GIB, gpu_memory_utilization=0.5))


def test_a_gpu_that_is_not_there_is_refused() -> None:
    host = HostFacts(has_cuda=True, num_gpus=2)
    with pytest.raises(ConfigError, match=r"cuda:7.*2 GPU\(s\), cuda:0 to cuda:1"):
        resolve(EngineConfig(device="cuda:7"), MODEL, host)
    assert resolve(EngineConfig(device="cuda:1"), MODEL, host).device == "cuda:1"
