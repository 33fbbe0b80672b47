"""A fresh process per run, so that peak memory, caches and warm-up are honest.

`run_variant` and `run_peaks` execute in the child and talk through a pipe; `Child` is the
parent's handle. A child that dies, by exception or by signal, becomes a `ChildFailed`.
"""

import importlib
import multiprocessing
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from tiny_vllm.bench.contention import CpuMeter
from tiny_vllm.bench.driver import TraceDriver
from tiny_vllm.bench.records import RunResult, ledger_difference
from tiny_vllm.bench.trace import TraceRequest
from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import TinyVllmError
from tiny_vllm.metrics import Peaks
from tiny_vllm.protocol import Engine

PROGRESS_INTERVAL_S = 0.1
TICK_S = 1.0  # longest silence towards the reporter, whatever the child does
WARMUP_OUTPUT = 4
RUNNING = "running"  # the phase on the clock
# ("phase", text) | ("tokens", count) | ("tick", None) from the parent itself |
# ("result", value) | ("error", (kind, message))
Event = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class RunSpec:
    """All a child needs. ``factory`` is ``module:class`` with a ``build(config)``."""

    factory: str
    config: EngineConfig
    requests: Sequence[TraceRequest]
    use_arrivals: bool = False
    max_prompt_len: int | None = None


class ChildFailed(Exception):
    """A child ended without a result; ``kind`` is the name of its exception."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def run_variant(connection: Connection, spec: RunSpec) -> None:
    """Child: build, warm up, run the trace, send the `RunResult`."""
    _guarded(connection, lambda: _measure(connection, spec))


def run_peaks(connection: Connection, device: str, dtype: str, threads: int) -> None:
    """Child: measure the ceilings of the device, send `Peaks` and if others disturbed it."""

    def work() -> tuple[Peaks, bool]:
        from tiny_vllm.bench.peaks import measure_and_watch

        return measure_and_watch(device, dtype, threads)

    _guarded(connection, work)


def _guarded(connection: Connection, work: Callable[[], Any]) -> None:
    """Send the result of ``work``, or the error it raised. Ends quietly without a parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children itself
    try:
        connection.send(_outcome(work))
    except BrokenPipeError:
        sys.exit(1)


def _outcome(work: Callable[[], Any]) -> Event:
    try:
        return "result", work()
    except BrokenPipeError:
        raise
    except Exception as error:
        if not isinstance(error, TinyVllmError):
            traceback.print_exc()
        name = type(error).__name__
        return "error", (name, f"{name}: {error}")


def _measure(connection: Connection, spec: RunSpec) -> RunResult:
    began = time.perf_counter()
    connection.send(("phase", "loading"))
    engine = _build(spec)
    built = time.perf_counter()
    connection.send(("phase", "warming up"))
    warm_up(engine, spec.requests)
    warm = time.perf_counter()
    connection.send(("phase", RUNNING))
    before = copy(engine.ledger)
    driver = TraceDriver(
        engine,
        spec.requests,
        use_arrivals=spec.use_arrivals,
        max_prompt_len=spec.max_prompt_len,
        on_progress=_Throttled(connection),
    )
    meter = CpuMeter.start()
    records = driver.run()
    cores = meter.read()
    from tiny_vllm.bench.device import describe_device, peak_memory

    result = RunResult(
        info=engine.info,
        requests=records,
        steps=driver.steps,
        wall_s=driver.wall_s,
        ledger=ledger_difference(engine.ledger, before),
        peak_memory=peak_memory(engine.info.device),
        environment={**describe_device(engine.info.device, _threads(engine)), **cores},
        build_s=built - began,
        warmup_s=warm - built,
    )
    engine.shutdown()
    return result


def _build(spec: RunSpec) -> Engine:
    module, _, name = spec.factory.partition(":")
    engine: Engine = getattr(importlib.import_module(module), name).build(spec.config)
    return engine


def _threads(engine: Engine) -> int | None:
    threads = engine.info.config.get("num_threads")
    return threads if isinstance(threads, int) else None


class _Throttled:
    """Sends the token count, at most every PROGRESS_INTERVAL_S seconds."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._next = connection, 0.0

    def __call__(self, generated_tokens: int) -> None:
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + PROGRESS_INTERVAL_S
            self._connection.send(("tokens", generated_tokens))


def warmup_requests(engine: Engine, requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """A short batch with ids unrelated to the trace: as wide as the trace's batch, and on
    a GPU with one prompt as long as its longest (kernels are compiled per shape)."""
    rng = random.Random("warm-up")
    info = engine.info
    slots = info.config.get("max_num_seqs")
    count = min(len(requests), slots if isinstance(slots, int) else len(requests))
    limit = max(1, min(info.max_model_len - WARMUP_OUTPUT, 8192))
    longest = max(request.num_prompt_tokens for request in requests)
    lengths = [min(32, longest, limit)] * count
    if info.device.startswith("cuda"):
        lengths[0] = min(longest, limit)
    return [
        TraceRequest(
            request_id=f"warm-up-{number}",
            prompt_token_ids=tuple(rng.choices(range(info.vocab_size), k=length)),
            max_tokens=min(WARMUP_OUTPUT, max(1, info.max_model_len - length)),
        )
        for number, length in enumerate(lengths)
    ]


def warm_up(engine: Engine, requests: Sequence[TraceRequest]) -> None:
    """Compile and touch everything outside the clock, then forget all cached prefixes."""
    TraceDriver(engine, warmup_requests(engine, requests)).run()
    if not engine.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be reset after the warm-up")


class Child:
    """A spawned process and its pipe; ends the process when the block is left."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=target, args=(sender, *args))
        self._process.start()
        sender.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._receiver.close()
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def result(self, on_event: Callable[[Event], None]) -> Any:
        """Wait for the result; other messages go to ``on_event``.

        Raises:
            ChildFailed: the child raised or died.
        """
        while True:
            if not wait([self._receiver, self._process.sentinel], TICK_S):
                on_event(("tick", None))
                continue
            if not self._receiver.poll():
                raise self._died()
            try:
                kind, value = self._receiver.recv()
            except EOFError:
                raise self._died() from None
            if kind == "result":
                self._process.join()
                return value
            if kind == "error":
                raise ChildFailed(*value)
            on_event((kind, value))

    def _died(self) -> ChildFailed:
        self._process.join()
        code = self._process.exitcode or 0
        if code == -signal.SIGKILL:
            return ChildFailed("Killed", "the process was killed: most likely out of memory")
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ChildFailed("Died", f"the process ended without a result ({reason})")


def run_child(target: Callable[..., None], *args: Any, on_event: Callable[[Event], None]) -> Any:
    """Run ``target`` in a fresh process and return what it sends back."""
    with Child(target, *args) as child:
        return child.result(on_event)
