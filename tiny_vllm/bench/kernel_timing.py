"""Times one op on a GPU. Imports torch, so only a run's own process imports it.

Many calls, in one CUDA graph, run over buffers that rotate, so that no call finds its data
in the L2 cache: timed by events on the GPU, the median of several replays. Calls that are not
captured are queued behind a pause of the GPU, so that launching them costs no time either.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from tiny_vllm.config import ModelConfig

ROTATED_BYTES = 256 << 20
MAX_COPIES = 128  # a few rows are small: they stay in the cache, as in a decode step
TARGET_S = 1e-3  # of a replay: its start then costs about a percent
MAX_S = 0.04
MAX_CALLS = 256
MAX_QUEUED = 16  # calls that are not captured
PAUSE_CYCLES = 4_000_000  # about two milliseconds

Call = Callable[[int], object]  # takes the number of the copy to run on

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(slots=True)
class Built:
    """An op that is ready to run.

    Attributes:
        kernel: runs it on one copy of its buffers.
        references: what else computes the same, by name.
        check: compares it with its definition; what is wrong, or None.
        copies: of the buffers.
        captures, references_capture: False queues the calls instead.
        facts: further numbers for the results.
    """

    kernel: Call
    references: dict[str, Call]
    check: Callable[[], str | None]
    copies: int = 1
    captures: bool = True
    references_capture: bool = True
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where and for which model ops are built."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    pdl: bool = False

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).mul_(scale)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def copies(self, num_bytes: int) -> int:
        return num_copies(num_bytes) if self.device.type == "cuda" else 2


def num_copies(num_bytes: int) -> int:
    """Copies of buffers of ``num_bytes`` that a run rotates over."""
    return min(MAX_COPIES, max(1, math.ceil(ROTATED_BYTES / max(num_bytes, 1))))


def num_calls(copies: int, guess_s: float, once_s: float, captures: bool = True) -> int:
    """Calls to time together.

    Args:
        guess_s: least seconds of a call; once_s: seconds that one call alone took.
    """
    wanted = max(copies, math.ceil(TARGET_S / guess_s))
    wanted = math.ceil(wanted / copies) * copies
    limit = MAX_CALLS if captures else MAX_QUEUED
    return max(1, min(wanted, limit, int(MAX_S / max(once_s, 1e-9))))


def fault(got: Tensor, want: Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with ``got``, None where it is ``want`` within the rounding of ``dtype``."""
    if not bool(got.isfinite().all()):
        return "the result is not finite"
    tolerance = _TOLERANCE[dtype]
    want = want.float()
    scale = want.square().mean().sqrt().clamp(min=1e-30)
    excess = float((((got.float() - want).abs() - tolerance * want.abs()) / scale).max())
    if excess <= tolerance:
        return None
    return f"off by {excess:.3g} of the root mean square, {tolerance:g} is allowed"


class Stopwatch:
    """Times calls on one device, on the current stream (not the default one of a GPU)."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats

    def seconds(self, call: Call, copies: int, guess_s: float, captures: bool = True) -> float:
        """Median seconds of a call; compiles and warms up first."""
        call(0)
        if self._device.type != "cuda":
            return median(_cpu_seconds(call, i % copies) for i in range(self._repeats))
        once_s = self._gpu_seconds(lambda: call(0))
        calls = num_calls(copies, guess_s, once_s, captures)
        if not captures:
            return self._queued(call, copies, calls)
        graph = _capture(call, copies, calls)
        graph.replay()
        times = [self._gpu_seconds(graph.replay) for _ in range(self._repeats)]
        return median(times) / calls

    def _queued(self, call: Call, copies: int, calls: int) -> float:
        def run() -> None:
            for i in range(calls):
                call(i % copies)

        run()
        times = [self._gpu_seconds(run, PAUSE_CYCLES) for _ in range(self._repeats)]
        return median(times) / calls

    def _gpu_seconds(self, run: Callable[[], object], pause: int = 0) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        if pause:
            torch.cuda._sleep(pause)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _capture(call: Call, copies: int, calls: int) -> torch.cuda.CUDAGraph:
    """Not by torch.cuda.graph, which empties the allocator's cache each time."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        for i in range(calls):
            call(i % copies)
    finally:
        graph.capture_end()
    return graph


def _cpu_seconds(call: Call, copy: int) -> float:
    start = time.perf_counter()
    call(copy)
    return time.perf_counter() - start
