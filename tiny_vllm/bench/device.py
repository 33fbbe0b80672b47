"""Facts of the device a run used. Imports torch, so only a run's own process calls it."""

import platform
from pathlib import Path
from typing import Any

import torch

from tiny_vllm.env import usable_cpus
from tiny_vllm.metrics import PeakMemory, peak_rss


def available_threads() -> int:
    """Number of cores this process may use."""
    return len(usable_cpus())


def device_name(device: str) -> str:
    """Model of the GPU or CPU."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_device(device: str, num_threads: int | None = None) -> dict[str, Any]:
    """Device name, torch version and CPU threads: what decides measured peaks."""
    return {
        "device": device,
        "device_name": device_name(device),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "num_threads": num_threads or available_threads(),
        "num_cores": available_threads(),
    }


def peak_memory(device: str) -> PeakMemory:
    """Peak memory over the life of this process: allocated on a GPU, resident on a CPU."""
    if device.startswith("cuda"):
        return PeakMemory(int(torch.cuda.max_memory_allocated(device)), "cuda_allocated")
    return peak_rss()


def last_level_cache_bytes(device: str) -> int:
    """Size of the cache nearest to memory; 0 when it is unknown."""
    if device.startswith("cuda"):
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG") or 0) * unit)
    return max(sizes)
