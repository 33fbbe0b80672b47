"""What the machine offers, and process settings that make CPU inference fast."""

import ctypes
import importlib.util
import os
import platform
import sys

import torch

from tiny_vllm.config import HostFacts

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def host_facts() -> HostFacts:
    """Look at this machine: GPU, native bf16, usable cores, memory."""
    has_cuda, reason = _cuda()
    return HostFacts(
        has_cuda=has_cuda,
        cuda_reason=reason,
        triton_fault=_triton_fault() if has_cuda else reason,
        gpu_memory_bytes=_gpu_memory() if has_cuda else 0,
        num_gpus=torch.cuda.device_count() if has_cuda else 0,
        cpu_bf16=_cpu_has_bf16(),
        num_cores=usable_cores(),
        available_memory_bytes=available_memory_bytes(),
    )


def _cuda() -> tuple[bool, str]:
    if not torch.cuda.is_available():
        built = "no CUDA device" if torch.version.cuda else "this torch build has no CUDA"
        return False, built
    major, minor = torch.cuda.get_device_capability()
    if major < 7:
        return False, f"the GPU has compute capability {major}.{minor}, 7.0 is needed"
    return True, f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"


def _triton_fault() -> str | None:
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"compute capability {major}.{minor}: the Triton kernels need 8.0 (Ampere)"
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    return None


def _gpu_memory() -> int:
    return int(torch.cuda.get_device_properties(0).total_memory)


def _cpu_has_bf16() -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def usable_cores() -> int:
    """Cores this process may use: OMP_NUM_THREADS if set, else those it may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping; 4 GiB when unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30


def tune_allocator() -> bool:
    """Keep freed temporaries mapped, so that each step does not fault them in again.

    Only for glibc; ``TINY_VLLM_MALLOC=0`` leaves malloc alone. Returns what was done.
    """
    if sys.platform != "linux" or os.environ.get("TINY_VLLM_MALLOC") == "0":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    threshold = 64 << 20
    return bool(mallopt(_M_MMAP_THRESHOLD, threshold) and mallopt(_M_TRIM_THRESHOLD, 2 * threshold))
