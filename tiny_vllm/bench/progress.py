"""The progress bar of a benchmark on stderr, and its null twin for ``--quiet``."""

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from tiny_vllm.bench.worker import Event


class Reporter(Protocol):
    """Hears about the runs of a benchmark."""

    def start(self, title: str, total_tokens: int) -> None: ...

    def event(self, event: Event) -> None: ...

    def end(self, outcome: str) -> None: ...

    def __enter__(self) -> "Reporter": ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Silent:
    """Says nothing."""

    def start(self, title: str, total_tokens: int) -> None: ...

    def event(self, event: Event) -> None: ...

    def end(self, outcome: str) -> None: ...

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None: ...


class _Rate(ProgressColumn):
    """Generated tokens per second since the run began."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} tok/s" if speed else "")


class Bars:
    """One bar per run, with phase, tokens and tokens/s."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[phase]}"),
            console=Console(stderr=True),
        )

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, title: str, total_tokens: int) -> None:
        self._task = self._progress.add_task(title, total=total_tokens, phase="starting")

    def event(self, event: Event) -> None:
        kind, value = event
        if kind == "phase":
            self._progress.update(self._task, phase=value)
        else:
            self._progress.update(self._task, completed=value)

    def end(self, outcome: str) -> None:
        self._progress.update(self._task, phase=outcome)
        self._progress.stop_task(self._task)
