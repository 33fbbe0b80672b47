"""Builds the data plane of an engine: model, KV pool and runner, from one config."""

from dataclasses import dataclass

from tiny_vllm.config import EngineConfig
from tiny_vllm.hub import ModelFiles
from tiny_vllm.models.loader import engine_info, load_model
from tiny_vllm.protocol import EngineInfo
from tiny_vllm.worker.memory import size_kv_pool
from tiny_vllm.worker.model_runner import ModelRunner, build_runner


@dataclass(slots=True)
class Worker:
    """A runner and the facts its engine needs. ``config`` is fully concrete."""

    runner: ModelRunner
    config: EngineConfig
    info: EngineInfo
    files: ModelFiles
    eos_token_ids: tuple[int, ...]


def build_worker(config: EngineConfig) -> Worker:
    """Load the model and allocate the cache.

    Raises:
        ModelLoadError, ConfigError: nothing is left behind then.
    """
    loaded = load_model(config)
    size_kv_pool(loaded)
    runner = build_runner(loaded)
    info = engine_info("extended", loaded)
    return Worker(runner, loaded.config, info, loaded.files, loaded.model_config.eos_token_ids)
