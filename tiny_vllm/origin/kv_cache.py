"""Contiguous KV memory of the baseline: a fixed number of slots of max_model_len tokens each.

Owns the tensors and the answer to how many slots fit. A request owns one slot from its
prefill to its end; nothing is shared. Memory starts at zero, so that what a mask hides is
always finite.
"""

import torch

from tiny_vllm.config import EngineConfig, ModelConfig
from tiny_vllm.errors import ConfigError
from tiny_vllm.models.device import available_memory_bytes
from tiny_vllm.models.loader import LoadedModel
from tiny_vllm.ops.memory import lazy_zeros


class ContiguousKvCache:
    """Keys and values of every layer, each [num_slots, kv_heads, max_len, head_dim]."""

    def __init__(
        self,
        model: ModelConfig,
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots, model.num_kv_heads, max_len, model.head_dim)
        self.num_slots, self.max_len = num_slots, max_len
        all_layers = (model.num_layers, *shape)
        self.keys = lazy_zeros(all_layers, dtype, device).unbind()
        self.values = lazy_zeros(all_layers, dtype, device).unbind()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of slot ``source`` into slot ``target``."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]


def plan_slots(asked: EngineConfig, loaded: LoadedModel) -> tuple[int, str]:
    """How many slots to allocate, and why.

    Args:
        asked: the settings before they were resolved: they tell a wish from a default.

    Raises:
        ConfigError: the slots asked for, or a single one, do not fit the memory.
    """
    config = loaded.config
    assert config.max_num_seqs is not None
    assert config.max_model_len is not None
    per_slot = loaded.model_config.kv_bytes_per_token(config.dtype) * config.max_model_len
    memory = asked.kv_cache_memory_bytes or _free_memory(loaded)
    if asked.max_num_seqs is not None:
        _check_fit(asked.max_num_seqs, per_slot, memory, config.max_model_len)
        return asked.max_num_seqs, "set by the user"
    _check_fit(1, per_slot, memory, config.max_model_len)
    budget = min(memory, config.kv_cache_memory_bytes or memory)
    fitting = max(1, budget // per_slot)
    if fitting < config.max_num_seqs:
        return fitting, f"slots of {per_slot} bytes that fit {budget} bytes"
    return config.max_num_seqs, config.reasons.get("max_num_seqs", "default of this device")


def _check_fit(num_slots: int, per_slot: int, memory: int, max_len: int) -> None:
    if num_slots * per_slot > memory:
        raise ConfigError(
            f"the contiguous KV cache of {num_slots} slots x {max_len} tokens needs "
            f"{num_slots * per_slot} bytes, {memory} are available; lower max_num_seqs to "
            f"{memory // per_slot} or lower max_model_len"
        )


def _free_memory(loaded: LoadedModel) -> int:
    if loaded.device.type != "cuda":
        return available_memory_bytes()
    free, total = torch.cuda.mem_get_info(loaded.device)
    return max(0, free - int((1 - loaded.config.gpu_memory_utilization) * total))
