"""Sizing of the KV pool on a device whose memory is measured after loading."""

import torch

from tiny_vllm.errors import ConfigError
from tiny_vllm.models.loader import LoadedModel

_RESERVE = 1 << 30  # activations and library workspaces of the largest step


def size_kv_pool(loaded: LoadedModel) -> None:
    """Fill ``num_blocks`` of a resolved config from free GPU memory; no-op when set.

    Raises:
        ConfigError: not even one block fits; names the setting to change.
    """
    config = loaded.config
    if config.num_blocks is not None:
        return
    assert config.block_size is not None
    block_bytes = loaded.model_config.kv_bytes_per_token(config.dtype) * config.block_size
    free, total = torch.cuda.mem_get_info(loaded.device)
    budget = config.kv_cache_memory_bytes
    reason = "kv_cache_memory_bytes"
    if budget is None:
        budget = int(config.gpu_memory_utilization * total) - (total - free) - _RESERVE
        reason = f"{free} bytes free of {total}, gpu_memory_utilization"
    if budget < block_bytes:
        raise ConfigError(
            f"no KV block fits: {budget} bytes are left for the pool, a block needs {block_bytes}; "
            "raise gpu_memory_utilization or lower block_size"
        )
    reasons = {**config.reasons, "num_blocks": f"{reason} / {block_bytes} bytes a block"}
    loaded.config = config.replace(num_blocks=budget // block_bytes, reasons=reasons)
