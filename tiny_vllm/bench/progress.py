"""The progress of a benchmark on stderr: bars at a terminal, lines elsewhere, or nothing.

Figures shown at the end of a run are the run's own, as in the table: before that they are
live and count from the start of the clock, not of the process.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from tiny_vllm.bench.worker import RUNNING, Event

LINE_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run did: generated tokens of its finished requests and its wall time."""

    tokens: int
    wall_s: float

    def __str__(self) -> str:
        rate = f", {self.tokens / self.wall_s:,.1f} tok/s" if self.tokens and self.wall_s else ""
        return f"{self.tokens:,} tokens in {self.wall_s:,.1f} s{rate}"


class Reporter(Protocol):
    """Hears about the runs of a benchmark."""

    def start(self, title: str, total_tokens: int | None) -> None: ...

    def event(self, event: Event) -> None: ...

    def end(self, outcome: str, figures: Figures | None = None) -> None: ...

    def __enter__(self) -> "Reporter": ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Silent:
    """Says nothing."""

    def start(self, title: str, total_tokens: int | None) -> None: ...

    def event(self, event: Event) -> None: ...

    def end(self, outcome: str, figures: Figures | None = None) -> None: ...

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None: ...


@dataclass(slots=True)
class _Run:
    """The state of the run in progress, kept from its events."""

    title: str
    total: int | None
    since: float
    phase: str = "starting"
    tokens: int = 0

    def take(self, event: Event, now: float) -> None:
        kind, value = event
        if kind == "phase":
            self.phase = value
            if value == RUNNING:
                self.since = now
        elif kind == "tokens":
            self.tokens = value

    def live(self, now: float) -> str:
        """Phase, seconds in it or on the clock, and the tokens where there are some."""
        seconds = now - self.since
        if self.phase != RUNNING or self.total is None:
            return f"{self.phase}, {seconds:.0f} s"
        rate = f", {self.tokens / seconds:,.1f} tok/s" if self.tokens and seconds > 0 else ""
        return f"{self.phase}, {self.tokens:,}/{self.total:,} tokens, {seconds:.0f} s{rate}"


class Lines:
    """For a log or a pipe: a line when a run starts and ends, and one about every 10 s."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._write, self._clock = write, clock

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, title: str, total_tokens: int | None) -> None:
        self._next = self._clock() + LINE_INTERVAL_S
        self._run = _Run(title, total_tokens, self._clock())
        self._write(f"{title}: starting")

    def event(self, event: Event) -> None:
        now = self._clock()
        self._run.take(event, now)
        if now >= self._next:
            self._next = now + LINE_INTERVAL_S
            self._write(f"{self._run.title}: {self._run.live(now)}")

    def end(self, outcome: str, figures: Figures | None = None) -> None:
        self._write(f"{self._run.title}: {outcome}" + (f", {figures}" if figures else ""))


class _Live(ProgressColumn):
    """What the run is doing, or what it did."""

    max_refresh = None

    def render(self, task: Task) -> Text:
        ended: str | None = task.fields["ended"]
        run: _Run = task.fields["run"]
        return Text(ended or run.live(time.perf_counter()))


class Bars:
    """One bar per run; it moves to and fro where nothing is counted."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=16), _Live(), console=console
        )

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, title: str, total_tokens: int | None) -> None:
        self._run = _Run(title, total_tokens, time.perf_counter())
        self._task = self._progress.add_task(title, total=None, run=self._run, ended=None)

    def event(self, event: Event) -> None:
        self._run.take(event, time.perf_counter())
        if self._run.phase == RUNNING:
            self._progress.update(self._task, total=self._run.total, completed=self._run.tokens)

    def end(self, outcome: str, figures: Figures | None = None) -> None:
        ended = outcome + (f", {figures}" if figures else "")
        total = self._run.total or 1
        completed = figures.tokens if figures else self._run.tokens if self._run.total else 1
        self._progress.update(self._task, total=total, completed=completed, ended=ended)
        self._progress.stop_task(self._task)


def make_reporter(quiet: bool) -> Reporter:
    """Bars at a terminal, lines elsewhere, nothing when ``quiet``."""
    console = Console(stderr=True)
    if quiet:
        return Silent()
    if console.is_terminal:
        return Bars(console)
    return Lines(lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True))
