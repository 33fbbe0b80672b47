"""What a benchmark says while it runs: lines without a terminal, and figures as in the table."""

from io import StringIO

import pytest
from rich.console import Console

from tiny_vllm.bench import progress
from tiny_vllm.bench.progress import Bars, Figures, Lines, Reporter, Silent, make_reporter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(reporter: Reporter, clock: Clock) -> None:
    """A run that loads for 5 s, runs for 27 s with 900 tokens, then the peaks."""
    with reporter:
        reporter.start("extended 1/1", 1000)
        reporter.event(("phase", "loading"))
        clock.now = 5.0
        reporter.event(("phase", "running"))
        for second in range(6, 32):
            clock.now = float(second)
            reporter.event(("tick", None))
            reporter.event(("tokens", 30 * second))
        reporter.end("done", Figures(1000, 25.0))
        reporter.start("measuring peaks", None)
        clock.now += 11.0
        reporter.event(("tick", None))
        reporter.end("done")


def test_without_a_terminal_there_is_a_line_about_every_ten_seconds() -> None:
    """It used to print nothing for minutes."""
    clock, lines = Clock(), list[str]()
    play(Lines(lines.append, clock), clock)
    assert lines == [
        "extended 1/1: starting",
        "extended 1/1: running, 270/1,000 tokens, 5 s, 54.0 tok/s",
        "extended 1/1: running, 570/1,000 tokens, 15 s, 38.0 tok/s",
        "extended 1/1: running, 870/1,000 tokens, 25 s, 34.8 tok/s",
        "extended 1/1: done, 1,000 tokens in 25.0 s, 40.0 tok/s",
        "measuring peaks: starting",
        "measuring peaks: starting, 11 s",
        "measuring peaks: done",
    ]


def test_the_bars_end_with_the_figures_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """They counted from the start of the process: loading lowered the rate. No 0/0 tokens."""
    clock, text = Clock(), StringIO()
    monkeypatch.setattr(progress.time, "perf_counter", clock)
    play(Bars(Console(file=text, force_terminal=True, width=120)), clock)
    last = text.getvalue()[-2000:]
    assert "done, 1,000 tokens in 25.0 s, 40.0 tok/s" in last
    assert "0/0" not in text.getvalue()
    assert "0:00" not in text.getvalue()


def test_failed_runs_end_without_figures() -> None:
    lines: list[str] = []
    reporter = Lines(lines.append, Clock())
    reporter.start("extended 1/1", 10)
    reporter.end("failed")
    assert lines[-1] == "extended 1/1: failed"
    assert str(Figures(0, 0.0)) == "0 tokens in 0.0 s"


def test_the_reporter_follows_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(make_reporter(quiet=True), Silent)
    reporter = make_reporter(quiet=False)
    assert isinstance(reporter, Lines)
    reporter.start("extended 1/1", 10)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "extended 1/1: starting\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_reporter(quiet=False), Bars)
