"""Peak memory of this process, always named with its kind.

Knows the kinds and how to read the resident set; the CUDA numbers come from the caller,
because this package does not import torch.
"""

from dataclasses import dataclass
from pathlib import Path

KINDS = ("cuda_allocated", "cuda_reserved", "rss")


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Highest memory use in bytes over the life of the process, and what was counted."""

    num_bytes: int
    kind: str

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


def peak_rss() -> PeakMemory:
    """Peak resident set of this process.

    Linux's VmHWM starts afresh with the program; ``ru_maxrss`` (elsewhere) may still hold
    the parent's peak after a fork.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return PeakMemory(int(line.split()[1]) * 1024, "rss")
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return PeakMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "rss")
