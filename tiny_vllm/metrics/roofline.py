"""The physical limit of a run: no step is faster than its bytes or its FLOPs allow.

Floor of a step = max(bytes / bandwidth, FLOPs / peak); bytes = weights once + unique KV
once + KV written. A working set that can live in the last-level cache has no byte floor.
A run under its floor is ``impossible``: flagged, not believed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tiny_vllm.protocol import EngineInfo, StepRecord

CACHE_FACTOR = 4  # a set this many times the cache cannot profit from it when streamed


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured ceilings of a device: bytes/s read from memory, FLOP/s of matrix products.

    ``cache_bytes`` is the last-level cache; 0 treats all reads as memory reads.
    """

    bandwidth: float
    flops: float
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and FLOPs that a step cannot avoid."""

    num_bytes: int
    flops: int

    def floor_s(self, peaks: Peaks) -> float:
        """Least seconds this work takes on a device with ``peaks``."""
        from_cache = self.num_bytes <= CACHE_FACTOR * peaks.cache_bytes
        memory_s = 0.0 if from_cache else self.num_bytes / peaks.bandwidth
        return max(memory_s, self.flops / peaks.flops)


def step_work(step: StepRecord, info: EngineInfo) -> Work:
    """Unavoidable work of one step: a step without tokens has none."""
    tokens = step.num_decode_tokens + step.num_prefill_tokens
    if not tokens:
        return Work(0, 0)
    written = tokens * info.kv_bytes_per_token
    attention = step.attention_context_tokens * info.attention_flops_per_context_token
    flops = tokens * info.linear_flops_per_token + attention
    flops += step.num_logit_rows * info.lm_head_flops_per_token
    return Work(info.weight_bytes + step.kv_bytes.physical + written, flops)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A run beside its limit.

    ``mbu`` and ``mfu`` are bytes and FLOPs per second of wall time over the peaks;
    ``share`` is floor / wall: 1 is the limit.
    """

    floor_s: float
    decode_floor_s: float
    num_bytes: int
    flops: int
    mbu: float
    mfu: float
    share: float
    impossible: bool


def run_roofline(
    steps: Sequence[StepRecord], info: EngineInfo, peaks: Peaks, wall_s: float
) -> Roofline:
    """Sum the floors of ``steps`` and compare them with ``wall_s`` seconds.

    The decode-only steps are also compared on their own, so that a decode time which is
    too good is not hidden behind a slow prefill.
    """
    works = [step_work(step, info) for step in steps]
    floors = [work.floor_s(peaks) for work in works]
    decode = [i for i, step in enumerate(steps) if not step.num_prefill_tokens]
    decode_s = sum(steps[i].end - steps[i].start for i in decode)
    decode_floor = sum(floors[i] for i in decode)
    num_bytes, flops = sum(w.num_bytes for w in works), sum(w.flops for w in works)
    floor = sum(floors)
    wall = max(wall_s, 1e-12)
    return Roofline(
        floor_s=floor,
        decode_floor_s=decode_floor,
        num_bytes=num_bytes,
        flops=flops,
        mbu=num_bytes / peaks.bandwidth / wall,
        mfu=flops / peaks.flops / wall,
        share=floor / wall,
        impossible=wall_s < floor or decode_s < decode_floor,
    )
