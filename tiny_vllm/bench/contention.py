"""Did other programs take the processors during a run? Read from /proc/stat; stdlib only.

Threads that wait for each other are slowed down many times by one busy neighbour, so a
time measured beside one must not pass as this engine's.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_vllm.env import usable_cpus

STAT = Path("/proc/stat")
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal
OTHERS_LIMIT = 0.25  # cores
FULL = 0.9  # of the cores in use: below it a neighbour found a core of its own


def busy_ticks(stat: str, cpus: frozenset[int]) -> int:
    """Clock ticks that ``cpus`` spent on anything but idling, from the text of /proc/stat."""
    total = 0
    for line in stat.splitlines():
        name, *fields = line.split() or [""]
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cpus:
            total += sum(int(fields[i]) for i in BUSY_FIELDS)
    return total


@dataclass(frozen=True, slots=True)
class CpuMeter:
    """Readings at the start of a span of time."""

    cpus: frozenset[int]
    busy_s: float | None
    own_s: float
    wall_s: float

    @classmethod
    def start(cls) -> "CpuMeter":
        cpus = usable_cpus()
        return cls(cpus, _busy_seconds(cpus), time.process_time(), time.perf_counter())

    def read(self) -> dict[str, float | None]:
        """Cores used since the start, by this process and by all others; None: unknown."""
        wall = max(time.perf_counter() - self.wall_s, 1e-9)
        own = (time.process_time() - self.own_s) / wall
        busy = _busy_seconds(self.cpus)
        if busy is None or self.busy_s is None:
            return {"own_cores": own, "other_cores": None}
        others = (busy - self.busy_s) / wall - own
        return {"own_cores": own, "other_cores": max(0.0, others)}


def _busy_seconds(cpus: frozenset[int]) -> float | None:
    try:
        return busy_ticks(STAT.read_text(), cpus) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def is_contended(environment: Mapping[str, Any]) -> bool:
    """True when other programs took cores from a run with these ``environment`` facts."""
    own, others, cores = (environment.get(k) for k in ("own_cores", "other_cores", "num_cores"))
    if own is None or others is None or cores is None:
        return False
    return others > OTHERS_LIMIT and own + others > FULL * cores
