"""A progress bar with rates, on stderr."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressBar:
    """Finished requests and tokens per second; a context manager."""

    def __init__(self, total: int) -> None:
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.1f} tok/s"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("requests", total=total, rate=0.0)
        self._start = time.perf_counter()
        self._tokens = 0

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, finished: int, new_tokens: int) -> None:
        """Show ``finished`` requests and add ``new_tokens`` to the rate."""
        self._tokens += new_tokens
        rate = self._tokens / max(time.perf_counter() - self._start, 1e-9)
        self._bar.update(self._task, completed=finished, rate=rate)
