"""The run folder: manifest.json, requests.jsonl, steps.jsonl, summary.json.

The manifest is written first and marks the state of the run (`running`, `complete`,
`failed`, `interrupted`), so that a folder is valid whenever the program ends.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_vllm.bench.records import RequestRecord, RunResult, step_from_json, step_to_json
from tiny_vllm.errors import ConfigError, TraceError
from tiny_vllm.protocol import StepRecord

MANIFEST, REQUESTS, STEPS = "manifest.json", "requests.jsonl", "steps.jsonl"
SUMMARY, PLOT = "summary.json", "comparison.png"
RunKey = tuple[str, int]  # (variant, repeat)


def check_free(path: Path) -> None:
    """Raise ConfigError when a folder holds the results of a finished run."""
    if (path / SUMMARY).exists():
        raise ConfigError(
            f"--out {path} holds the results of an earlier run; give another folder, or --force "
            "to overwrite them"
        )


@dataclass(slots=True)
class RunFolder:
    """Writer of one run folder; ``manifest`` is saved after every change."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def create(cls, path: Path, manifest: dict[str, Any]) -> "RunFolder":
        """Make (or empty) the folder.

        Raises:
            ConfigError: it cannot be written.
        """
        folder = cls(path, {**manifest, "status": "running", "runs": []})
        try:
            path.mkdir(parents=True, exist_ok=True)
            for name in (REQUESTS, STEPS):
                (path / name).write_text("")
            for name in (SUMMARY, PLOT):
                (path / name).unlink(missing_ok=True)
            folder.save()
        except OSError as error:
            raise ConfigError(
                f"--out {path} cannot be written: {error.strerror}; give a folder of your own"
            ) from error
        return folder

    def save(self) -> None:
        (self.path / MANIFEST).write_text(json.dumps(self.manifest, indent=1) + "\n")

    def add_run(self, variant: str, repeat: int, result: RunResult) -> None:
        """Append the rows of one finished run, then its entry in the manifest."""
        key = {"variant": variant, "repeat": repeat}
        self._append(REQUESTS, [{**key, **r.to_json()} for r in result.requests])
        self._append(STEPS, [{**key, **step_to_json(s)} for s in result.steps])
        self.manifest["runs"].append({**key, **result.header()})
        self.save()

    def add_failure(self, variant: str, repeat: int, kind: str, error: str) -> None:
        """Record a run that gave no result; ``kind`` is the name of its exception."""
        entry = {"variant": variant, "repeat": repeat, "error": error, "error_kind": kind}
        self.manifest["runs"].append(entry)
        self.save()

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)

    def finish(self, status: str) -> None:
        self.manifest["status"] = status
        self.save()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        (self.path / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")


@dataclass(slots=True)
class RunData:
    """A run folder in memory: the only input of summaries and reports."""

    manifest: dict[str, Any]
    requests: dict[RunKey, list[RequestRecord]] = field(default_factory=dict)
    steps: dict[RunKey, list[StepRecord]] = field(default_factory=dict)


def load_run(path: str | Path) -> RunData:
    """Read a run folder.

    Raises:
        TraceError: it is not a run folder, or a file of it is damaged.
    """
    folder = Path(path)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        data = RunData(manifest, defaultdict(list), defaultdict(list))
        for row in _rows(folder / REQUESTS):
            key = (row["variant"], row["repeat"])
            data.requests[key].append(RequestRecord.from_json(row))
        for row in _rows(folder / STEPS):
            data.steps[(row["variant"], row["repeat"])].append(step_from_json(row))
    except OSError as error:
        raise TraceError(f"{folder} is not a run folder: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"run folder {folder} is damaged: {error!r}") from error
    return data


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
