"""Memory for KV caches, and copies within and to it."""

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages a CPU maps when they are first written, so that an unused pool is free.

    torch.zeros writes them all at once; numpy leaves it to the system.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array without waiting for what the device runs (through pinned memory)."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def copy_slots(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy KV slots of all layers; every source is read before any target is written.

    Args:
        cache: [layers, kv_heads, slots, head_dim].
        source, target: int64 [n], of one length.
    """
    cache.index_copy_(2, target, cache.index_select(2, source))
