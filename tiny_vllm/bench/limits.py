"""Gives every run of a folder the measured peaks of its device.

Peaks come from the cache or are measured in a process of their own after the last run,
when nothing else is busy. A run that beats its floor has them measured again: only then
is it called impossible.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tiny_vllm.bench.folder import RunData, RunFolder, load_run
from tiny_vllm.bench.peaks_cache import max_peaks, peaks_key, read_cached, write_cached
from tiny_vllm.bench.progress import Reporter
from tiny_vllm.bench.worker import ChildFailed, run_child, run_peaks
from tiny_vllm.metrics import Peaks, run_roofline
from tiny_vllm.protocol import EngineInfo

Run = Mapping[str, Any]
BUSY = (
    "the peaks were measured beside other programs: the roofline is too low; they are measured "
    "again next time"
)


def attach_peaks(folder: RunFolder, reporter: Reporter) -> None:
    """Add ``peaks`` to the manifest entry of every finished run, and save it."""
    runs = [run for run in folder.manifest["runs"] if "error" not in run]
    if not runs:
        return
    data = load_run(folder.path)
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(_key(run), []).append(run)
    for key, members in groups.items():
        peaks = read_cached(key) or _measure(key, members[0], folder, reporter)
        if peaks and any(_beats_floor(run, data, peaks) for run in members):
            peaks = _measure(key, members[0], folder, reporter) or peaks
        for run in members:
            run["peaks"] = asdict(peaks) if peaks else None
    folder.save()


def _key(run: Run) -> str:
    facts = run["environment"]
    return peaks_key(
        facts["device_name"], facts["torch"], run["info"]["dtype"], facts["num_threads"]
    )


def _beats_floor(run: Run, data: RunData, peaks: Peaks) -> bool:
    steps = data.steps.get((run["variant"], run["repeat"]), [])
    return run_roofline(steps, EngineInfo(**run["info"]), peaks, run["wall_s"]).impossible


def _measure(key: str, run: Run, folder: RunFolder, reporter: Reporter) -> Peaks | None:
    device, dtype = run["info"]["device"], run["info"]["dtype"]
    reporter.start("measuring peaks", None)
    try:
        peaks, was_busy = run_child(
            run_peaks, device, dtype, run["environment"]["num_threads"], on_event=reporter.event
        )
    except ChildFailed as error:
        folder.manifest["notes"].append(f"no roofline: the peaks were not measured ({error})")
        reporter.end("failed")
        return None
    reporter.end("done")
    if was_busy:
        folder.manifest["notes"].append(BUSY)
        return max_peaks(peaks, read_cached(key))
    return write_cached(key, peaks)
