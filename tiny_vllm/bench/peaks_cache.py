"""Measured peaks kept on disk, per device, torch version, dtype and threads. No torch.

A peak is an upper limit: storing one can only raise what is there. A cache that cannot be
read or written is no error; the next run measures again.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tiny_vllm.metrics import Peaks

FILE = "peaks.json"


def cache_file() -> Path:
    """Where peaks are kept: $XDG_CACHE_HOME/tiny_vllm, else ~/.cache/tiny_vllm."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(root) / "tiny_vllm" / FILE


def peaks_key(device_name: str, torch_version: str, dtype: str, threads: int) -> str:
    """Key of an entry; threads do not matter on a GPU but are harmless there."""
    return f"{device_name} | torch {torch_version} | {dtype} | {threads} threads"


def _read_all() -> dict[str, Any]:
    try:
        entries = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def read_cached(key: str) -> Peaks | None:
    """Peaks measured earlier, None when there are none."""
    entry = _read_all().get(key)
    try:
        return Peaks(**entry) if entry else None
    except TypeError:
        return None


def max_peaks(new: Peaks, old: Peaks | None) -> Peaks:
    """The higher of two measurements of one device, number by number."""
    if old is None:
        return new
    bandwidth = max(old.bandwidth, new.bandwidth)
    return Peaks(bandwidth, max(old.flops, new.flops), new.cache_bytes)


def write_cached(key: str, peaks: Peaks) -> Peaks:
    """Keep the higher of ``peaks`` and the cached ones, and return it."""
    peaks = max_peaks(peaks, read_cached(key))
    path = cache_file()
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({**_read_all(), key: asdict(peaks)}, indent=1))
        temporary.replace(path)
    except OSError:
        pass
    return peaks
