"""Drives one engine through one trace: add at arrival, step, record. Nothing is dropped.

Knows only the `Engine` protocol. A request that the engine refuses becomes a failed
record and the run goes on; a request that never finishes is an error, too.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tiny_vllm.bench.records import RequestRecord
from tiny_vllm.bench.trace import TraceRequest
from tiny_vllm.errors import EngineDeadError, InvalidRequestError, RequestTooLongError
from tiny_vllm.outputs import FinishReason, RequestOutput
from tiny_vllm.protocol import Engine, StepRecord
from tiny_vllm.sampling_params import SamplingParams

MAX_IDLE_STEPS = 10_000  # steps in a row that ran nothing: the engine hangs


def _ignore_progress(generated_tokens: int) -> None:
    del generated_tokens


def check_lengths(request: TraceRequest, max_prompt_len: int | None, max_model_len: int) -> None:
    """Refuse what an engine would shorten in silence: less work is another workload.

    Raises:
        RequestTooLongError: above MAX_PROMPT_LEN, or prompt and output above the context.
    """
    length = request.num_prompt_tokens
    if max_prompt_len is not None and length > max_prompt_len:
        raise RequestTooLongError(
            f"the prompt has {length} tokens, MAX_PROMPT_LEN={max_prompt_len} allows no more; "
            "shorten it or raise MAX_PROMPT_LEN",
            "prompt",
        )
    if length + request.max_tokens > max_model_len:
        raise RequestTooLongError(
            f"{length} prompt tokens and {request.max_tokens} new ones are "
            f"{length + request.max_tokens}, max_model_len={max_model_len} holds no more; "
            "shorten the request (--scale, --max-new-tokens) or raise MAX_SEQ_LEN or "
            "--max-model-len, if the model allows it",
            "max_tokens",
        )


@dataclass(slots=True)
class TraceDriver:
    """One pass of ``requests`` through ``engine``.

    Attributes:
        use_arrivals: replay recorded arrivals; False adds all requests at the start.
        max_prompt_len: longer prompts are refused here (MAX_PROMPT_LEN); None: no limit.
        on_progress: called after each step with the tokens generated so far.
        clock, sleep: seconds; the engine's own times must be on the same clock.
    """

    engine: Engine
    requests: Sequence[TraceRequest]
    use_arrivals: bool = False
    max_prompt_len: int | None = None
    on_progress: Callable[[int], None] = _ignore_progress
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    records: dict[str, RequestRecord] = field(init=False, default_factory=dict)
    steps: list[StepRecord] = field(init=False, default_factory=list)
    wall_s: float = field(init=False, default=0.0)
    _start: float = field(init=False, default=0.0)
    _waiting: deque[tuple[float, TraceRequest]] = field(init=False, default_factory=deque)
    _generated: int = field(init=False, default=0)
    _idle_steps: int = field(init=False, default=0)
    _last: int | None = field(init=False, default=None)  # number of the last step seen

    def run(self) -> list[RequestRecord]:
        """Run to the end; returns the records in trace order.

        Raises:
            EngineDeadError: the engine makes no progress.
        """
        timed = [(self._arrival(request), request) for request in self.requests]
        self._waiting = deque(sorted(timed, key=lambda pair: pair[0]))
        self._last = self.engine.last_step.step if self.engine.last_step else None
        self._start = self.clock()
        while self._waiting or self.engine.has_unfinished_requests():
            self._admit()
            if self.engine.has_unfinished_requests():
                self._step()
            elif self._waiting:
                self.sleep(max(0.0, self._waiting[0][0] - self._now()))
        for record in self.records.values():
            if record.finish_reason is None and record.error is None:
                record.error = "the engine never finished this request"
        return [self.records[request.request_id] for request in self.requests]

    def _arrival(self, request: TraceRequest) -> float:
        return (request.arrival or 0.0) if self.use_arrivals else 0.0

    def _now(self) -> float:
        return self.clock() - self._start

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._now():
            arrival, request = self._waiting.popleft()
            self.records[request.request_id] = self._add(request, arrival)

    def _add(self, request: TraceRequest, arrival: float) -> RequestRecord:
        record = RequestRecord(
            request.request_id, arrival, request.num_prompt_tokens, request.max_tokens
        )
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        try:
            check_lengths(request, self.max_prompt_len, self.engine.info.max_model_len)
            self.engine.add_request(request.request_id, request.token_ids, params)
        except InvalidRequestError as error:
            record.finish_reason, record.error = FinishReason.ERROR.value, str(error)
        return record

    def _step(self) -> None:
        outputs = self.engine.step()
        self.wall_s = self._now()
        self._keep_step()
        for output in outputs:
            self._update(self.records[output.request_id], output)
        self.on_progress(self._generated)

    def _keep_step(self) -> None:
        last = self.engine.last_step
        if last is not None and last.step != self._last:
            self._last = last.step
            if last.num_decode_tokens + last.num_prefill_tokens:
                start, end = last.start - self._start, last.end - self._start
                self.steps.append(replace(last, start=start, end=end))
                self._idle_steps = 0
                return
        self._idle_steps += 1
        if self._idle_steps >= MAX_IDLE_STEPS:
            raise EngineDeadError(f"{MAX_IDLE_STEPS} steps in a row ran no token: the engine hangs")

    def _update(self, record: RequestRecord, output: RequestOutput) -> None:
        new = output.num_output_tokens - len(record.token_times)
        record.token_times += [self.wall_s] * new
        self._generated += new
        record.cached_tokens = output.num_cached_tokens
        if output.finished:
            self._finish(record, output)

    def _finish(self, record: RequestRecord, output: RequestOutput) -> None:
        completion, metrics = output.outputs[0], output.metrics
        record.output_token_ids = list(completion.token_ids)
        record.finish_reason = (completion.finish_reason or FinishReason.ERROR).value
        report = output.cache_report
        record.cache_report = None if report is None else report.to_dict()
        if metrics is not None:
            record.preemptions = metrics.num_preemptions
            if len(metrics.token_times) == len(record.token_times):
                record.token_times = [t - self._start for t in metrics.token_times]
        if completion.finish_reason in (FinishReason.ERROR, FinishReason.ABORT, None):
            record.error = output.error or f"finished with reason {record.finish_reason}"
