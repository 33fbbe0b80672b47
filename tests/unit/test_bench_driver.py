"""The driver against a fake engine and a fake clock: times by hand, nothing lost."""

from collections.abc import Sequence

import pytest
from bench_fake import FakeEngine

from tiny_vllm.bench.driver import MAX_IDLE_STEPS, TraceDriver
from tiny_vllm.bench.trace import TraceRequest
from tiny_vllm.bench.worker import warm_up, warmup_requests
from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import EngineDeadError, InvalidRequestError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams


class Clock:
    """Moves only when told to; every look costs ``tick`` seconds."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 100.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowEngine(FakeEngine):
    """A step takes one second of the fake clock."""

    def step(self) -> list[RequestOutput]:
        clock = self.clock
        assert isinstance(clock, Clock)
        clock.sleep(1.0)
        return super().step()


def engine(clock: Clock | None = None, **config: object) -> SlowEngine:
    return SlowEngine(EngineConfig.create(max_model_len=64, **config), clock or Clock())


def request(name: str, prompt: int, output: int, arrival: float | None = None) -> TraceRequest:
    ids = tuple(range(10, 10 + prompt))
    return TraceRequest(request_id=name, prompt_token_ids=ids, max_tokens=output, arrival=arrival)


def drive(fake: SlowEngine, *requests: TraceRequest, **options: object) -> TraceDriver:
    clock = fake.clock
    assert isinstance(clock, Clock)
    driver = TraceDriver(fake, requests, clock=clock, sleep=clock.sleep, **options)  # type: ignore[arg-type]
    driver.run()
    return driver


def test_everything_at_once() -> None:
    """Prefill of both at second 1, then one token a second for each."""
    driver = drive(engine(), request("a", 8, 3), request("b", 4, 2))
    a, b = driver.records["a"], driver.records["b"]
    assert a.token_times == [1.0, 2.0, 3.0]
    assert b.token_times == [1.0, 2.0]
    assert a.output_token_ids == [(sum(range(10, 18)) + 7 * i) % 1000 for i in range(3)]
    assert (a.arrival, a.finish_reason, a.error) == (0.0, "length", None)
    assert driver.wall_s == 3.0
    assert [(s.start, s.end, s.kind) for s in driver.steps] == [
        (1.0, 1.0, "prefill"),
        (2.0, 2.0, "decode"),
        (3.0, 3.0, "decode"),
    ]


def test_recorded_arrivals_are_waited_for() -> None:
    """b arrives at 10 s while the engine is idle, c at 11.5 s in the middle of a step: its
    clock starts when it came, not when the driver noticed."""
    requests = (request("b", 4, 2, 10.0), request("c", 5, 1, 11.5), request("a", 8, 2, 0.0))
    driver = drive(engine(), *requests, use_arrivals=True)
    assert driver.records["a"].token_times == [1.0, 2.0]
    assert driver.records["b"].token_times == [11.0, 12.0]
    assert driver.records["c"].arrival == 11.5
    assert driver.records["c"].token_times == [13.0]
    assert driver.wall_s == 13.0


def test_arrivals_are_ignored_when_everything_comes_at_once() -> None:
    driver = drive(engine(), request("a", 8, 1, 50.0))
    assert driver.records["a"].arrival == 0.0
    assert driver.wall_s == 1.0


def test_records_keep_the_order_of_the_trace() -> None:
    fake = engine()
    requests = [request("b", 4, 2, 3.0), request("a", 4, 1, 0.0)]
    driver = TraceDriver(fake, requests, True, clock=fake.clock, sleep=fake.clock.sleep)
    assert [r.request_id for r in driver.run()] == ["b", "a"]


def test_a_request_that_does_not_fit_fails_and_the_run_goes_on() -> None:
    driver = drive(engine(), request("long", 60, 9), request("good", 8, 2))
    long = driver.records["long"]
    assert long.failed
    assert "60 prompt tokens and 9 new ones are 69, max_model_len=64" in (long.error or "")
    assert (long.finish_reason, long.output_token_ids) == ("error", [])
    assert driver.records["good"].output_token_ids


def test_a_request_that_the_engine_refuses_fails_and_the_run_goes_on() -> None:
    class Picky(SlowEngine):
        def add_request(self, request_id: str, ids: Sequence[int], params: SamplingParams) -> None:
            if request_id == "odd":
                raise InvalidRequestError("no odd ones")
            super().add_request(request_id, ids, params)

    fake = Picky(EngineConfig.create(max_model_len=64), Clock())
    driver = drive(fake, request("odd", 8, 2), request("good", 8, 2))
    assert driver.records["odd"].error == "no odd ones"
    assert driver.records["good"].output_token_ids


def test_max_prompt_len_refuses_longer_prompts() -> None:
    driver = drive(engine(), request("long", 9, 1), request("good", 8, 1), max_prompt_len=8)
    assert "9 tokens, MAX_PROMPT_LEN=8" in (driver.records["long"].error or "")
    assert not driver.records["good"].failed


def test_all_requests_refused_is_a_run_of_no_steps() -> None:
    driver = drive(engine(), request("long", 60, 9))
    assert (driver.steps, driver.wall_s) == ([], 0.0)


def test_an_engine_without_token_times_gets_the_drivers() -> None:
    class Untimed(SlowEngine):
        def step(self) -> list[RequestOutput]:
            outputs = super().step()
            for output in outputs:
                output.metrics = None
            return outputs

        def _append(self, output: RequestOutput, *rest: object) -> None:
            from tiny_vllm.outputs import RequestMetrics

            output.metrics = RequestMetrics(0.0)
            super()._append(output, *rest)  # type: ignore[arg-type]

    fake = Untimed(EngineConfig.create(max_model_len=64), Clock())
    assert drive(fake, request("a", 8, 3)).records["a"].token_times == [1.0, 2.0, 3.0]


def test_a_request_the_engine_forgets_is_reported() -> None:
    class Forgetful(SlowEngine):
        def has_unfinished_requests(self) -> bool:
            return bool(self._waiting)

    fake = Forgetful(EngineConfig.create(max_model_len=64), Clock())
    record = drive(fake, request("a", 8, 3)).records["a"]
    assert record.error == "the engine never finished this request"


def test_an_engine_that_runs_nothing_is_stopped() -> None:
    class Stuck(SlowEngine):
        steps_taken = 0

        def step(self) -> list[RequestOutput]:
            self.steps_taken += 1
            return []

    fake = Stuck(EngineConfig.create(max_model_len=64), Clock())
    with pytest.raises(EngineDeadError, match="hangs"):
        drive(fake, request("a", 8, 3))
    assert fake.steps_taken == MAX_IDLE_STEPS


def test_progress_counts_tokens() -> None:
    seen: list[int] = []
    drive(engine(), request("a", 8, 3), request("b", 8, 1), on_progress=seen.append)
    assert seen == [2, 3, 4]


def test_case_20_warm_up_is_unrelated_and_leaves_the_cache_cold() -> None:
    fake = FakeEngine(EngineConfig.create(max_model_len=64))
    trace = [request(str(n), 40, 8) for n in range(3)]
    warmed = {tuple(r.token_ids) for r in warmup_requests(fake, trace)}
    assert len(warmed) == 3
    assert all(len(ids) == 32 for ids in warmed)
    assert not warmed & {tuple(r.token_ids[:32]) for r in trace}
    warm_up(fake, trace)
    assert (fake.resets, fake.seen) == (1, [])


def test_a_cache_that_cannot_be_reset_stops_the_run() -> None:
    fake = FakeEngine(EngineConfig.create(max_model_len=64))
    fake.reset_prefix_cache = lambda: False  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="could not be reset"):
        warm_up(fake, [request("a", 4, 1)])


def test_warm_up_fits_a_short_context() -> None:
    fake = FakeEngine(EngineConfig.create(max_model_len=4))
    warm_up(fake, [request("a", 3, 1)])
    assert fake.ledger.forward_tokens > 0
