"""Busy neighbours are noticed: a run beside one once read 1.4 s a step instead of 0.04."""

import time
from pathlib import Path

import pytest

from tiny_vllm.bench import contention
from tiny_vllm.bench.contention import CpuMeter, busy_ticks, is_contended
from tiny_vllm.env import usable_cpus

STAT = """cpu  100 20 30 4000 50 1 2 3 0 0
cpu0 60 10 10 2000 25 1 1 2 0 0
cpu1 40 10 20 2000 25 0 1 1 0 0
intr 12345 0 0
"""


def test_busy_time_is_everything_but_idle_and_waiting() -> None:
    assert busy_ticks(STAT, frozenset({0})) == 60 + 10 + 10 + 1 + 1 + 2
    assert busy_ticks(STAT, frozenset({0, 1})) == 84 + 40 + 10 + 20 + 0 + 1 + 1
    assert busy_ticks(STAT, frozenset()) == 0


@pytest.mark.parametrize(
    ("own", "others", "cores", "contended"),
    [
        (1.9, 0.05, 2, False),  # quiet
        (1.2, 0.8, 2, True),  # a neighbour took most of a core
        (1.9, 0.8, 8, False),  # a neighbour on a core of its own
        (6.0, 2.0, 8, True),
        (1.0, None, 2, False),  # unknown
    ],
)
def test_contention(own: float, others: float | None, cores: int, contended: bool) -> None:
    facts = {"own_cores": own, "other_cores": others, "num_cores": cores}
    assert is_contended(facts) is contended


def test_the_meter_subtracts_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """150 busy ticks in one second of which this process used half a second."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(contention, "STAT", stat)
    monkeypatch.setattr(contention, "usable_cpus", lambda: frozenset({0}))
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    clock = {"perf_counter": 5.0, "process_time": 1.0}
    for name in clock:
        monkeypatch.setattr(time, name, lambda name=name: clock[name])
    stat.write_text("cpu0 100 0 0 0 0 0 0 0\n")
    meter = CpuMeter.start()
    stat.write_text("cpu0 250 0 0 0 0 0 0 0\n")
    clock.update(perf_counter=6.0, process_time=1.5)
    assert meter.read() == {"own_cores": 0.5, "other_cores": 1.0}


def test_without_proc_the_others_are_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(contention, "STAT", tmp_path / "none")
    assert CpuMeter.start().read()["other_cores"] is None


def test_there_is_a_processor() -> None:
    assert len(usable_cpus()) >= 1
