"""Runs in real processes: a result, an exception, a kill, an orphan's end."""

import multiprocessing
from typing import Any

import pytest

from tiny_vllm.bench.records import RunResult
from tiny_vllm.bench.trace import TraceRequest
from tiny_vllm.bench.worker import Child, ChildFailed, Event, RunSpec, run_child, run_variant
from tiny_vllm.config import EngineConfig

TRACE = [
    TraceRequest(request_id=str(n), prompt_token_ids=(20, 21, 30 + n), max_tokens=4)
    for n in range(3)
]


def spec(name: str) -> RunSpec:
    return RunSpec(f"bench_fake:{name}", EngineConfig(max_model_len=64), TRACE)


def test_a_run_in_its_own_process() -> None:
    events: list[Event] = []
    result = run_child(run_variant, spec("FakeEngine"), on_event=events.append)
    assert isinstance(result, RunResult)
    assert [r.finish_reason for r in result.requests] == ["length"] * 3
    assert result.ledger.prompt_tokens == 9
    assert result.peak_memory.kind == "rss"
    assert result.environment["num_threads"] == 1
    assert [e for e in events if e[0] == "phase"] == [
        ("phase", "loading"),
        ("phase", "warming up"),
        ("phase", "running"),
    ]
    assert ("tokens", 3) in events


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("BrokenEngine", "ArithmeticError", "ArithmeticError: the numbers went wrong"),
        ("RefusingEngine", "ConfigError", "is no good"),
        ("KilledEngine", "Killed", "most likely out of memory"),
        ("NoSuchEngine", "AttributeError", "NoSuchEngine"),
    ],
)
def test_a_child_that_fails(name: str, kind: str, message: str) -> None:
    with pytest.raises(ChildFailed, match=message) as error:
        run_child(run_variant, spec(name), on_event=lambda _: None)
    assert error.value.kind == kind


def sleep_for_ever(connection: Any) -> None:
    import time

    connection.send(("phase", "asleep"))
    time.sleep(3600)


def test_leaving_the_block_ends_the_child() -> None:
    """Ctrl-C in the parent, while the child works."""

    def interrupt(_: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Child(sleep_for_ever) as child:
        child.result(interrupt)
    assert multiprocessing.active_children() == []


def exit_quietly(connection: Any) -> None:
    del connection


def test_a_child_that_just_ends_is_no_success() -> None:
    with pytest.raises(ChildFailed, match=r"without a result \(exit code 0\)"):
        run_child(exit_quietly, on_event=lambda _: None)
