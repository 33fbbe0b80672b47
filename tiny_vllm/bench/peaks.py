"""Measures the ceilings of this machine: memory read bandwidth and matrix-product rate.

A peak is an upper limit, so the best of many repetitions counts. Imports torch; takes
about two seconds and wants a quiet machine.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from tiny_vllm.bench.contention import CpuMeter, is_contended
from tiny_vllm.bench.device import available_threads, describe_device, last_level_cache_bytes
from tiny_vllm.bench.peaks_cache import peaks_key, read_cached, write_cached
from tiny_vllm.metrics import Peaks

BUDGET_S = 0.2  # per measured operation
MIN_REPEATS = 3


def get_peaks(device: str, dtype: str, threads: int | None = None) -> Peaks:
    """Cached peaks of this machine, measured now when there are none."""
    threads = threads or available_threads()
    facts = describe_device(device, threads)
    key = peaks_key(facts["device_name"], facts["torch"], dtype, threads)
    cached = read_cached(key)
    if cached is not None:
        return cached
    peaks, was_busy = measure_and_watch(device, dtype, threads)
    return peaks if was_busy else write_cached(key, peaks)


def measure_and_watch(device: str, dtype: str, threads: int) -> tuple[Peaks, bool]:
    """Peaks, and whether other programs disturbed the measurement: then do not keep them."""
    meter = CpuMeter.start()
    peaks = measure_peaks(device, dtype, threads)
    return peaks, is_contended({**meter.read(), "num_cores": available_threads()})


def measure_peaks(device: str, dtype: str, threads: int) -> Peaks:
    """Measure on ``device`` with tensors of ``dtype`` (a torch dtype's name)."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads)
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # TF32: an engine may switch it on
    try:
        cache = last_level_cache_bytes(device)
        bandwidth = _read_bandwidth(torch.device(device), cache)
        flops = _matmul_rate(torch.device(device), getattr(torch, dtype))
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
    return Peaks(bandwidth, flops, cache)


def _read_bandwidth(device: torch.device, cache_bytes: int) -> float:
    """Bytes/s of the best of several read-only passes over memory far above the cache:
    no working set of a model streams faster."""
    size = max(8 * cache_bytes, (1 << 31) if device.type == "cuda" else (1 << 28))
    data = torch.ones(size // 8, 2, dtype=torch.float32, device=device)  # [size / 8, 2]
    left, right = data.view(2, -1)
    passes: list[Callable[[], object]] = [data.amax, data.sum, partial(torch.dot, left, right)]
    return max(size / _best_seconds(work, device) for work in passes)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best square matrix product."""
    best = 0.0
    for n in (4096, 8192) if device.type == "cuda" else (1024, 2048):
        a = torch.randn(n, n, device=device).to(dtype)
        b = torch.randn(n, n, device=device).to(dtype)
        for right in (b, b.t()):
            product = partial(torch.mm, a, right, out=torch.empty_like(a))
            best = max(best, 2 * n**3 / _best_seconds(product, device))
    return best


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Least seconds of one call, over repetitions that fill BUDGET_S."""
    work()
    best = float("inf")
    end = time.perf_counter() + BUDGET_S
    repeats = 0
    while repeats < MIN_REPEATS or time.perf_counter() < end:
        best = min(best, _seconds(work, device))
        repeats += 1
    return best


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
