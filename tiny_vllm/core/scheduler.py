"""The scheduler: one token budget per step, no phases.

Each step, running requests come first (decodes, then prefills), then waiting ones in the
order of their queue. Owns request states, the queue and the ledger. Every `schedule` is
followed by one `update_from_output` for the same step. A running request advances in
every step unless it is preempted. Knows no tensors and no text.
"""

import time
from collections.abc import Iterator, Mapping

from tiny_vllm.config import EngineConfig
from tiny_vllm.core.accounting import Accountant
from tiny_vllm.core.admission import check_can_ever_run
from tiny_vllm.core.block_hash import HashFn, blake2b_128
from tiny_vllm.core.hold_back import HoldBack
from tiny_vllm.core.kv_cache_manager import KVCacheManager, PrefixHit
from tiny_vllm.core.miss_reasons import explain
from tiny_vllm.core.pins import Pin
from tiny_vllm.core.queue import PrefixQueue, WaitingQueue
from tiny_vllm.core.step_plan import StepPlan
from tiny_vllm.core.stop import Stop, check_stop, prepare_stops
from tiny_vllm.errors import ConfigError, InvalidRequestError
from tiny_vllm.outputs import FinishReason, TokenLogprobs
from tiny_vllm.protocol import (
    CachedRequestData,
    EngineCoreOutput,
    ModelRunnerOutput,
    SampledToken,
    SchedulerOutput,
    TokenLedger,
)
from tiny_vllm.request import BlockId, Request, RequestId, RequestStatus

_MAX_HELD_LOOKED_AT = 64  # waiting requests that may be held and passed over in a step
_NOT_SAMPLED = "the model runner returned no token for a request that was due one"


def _concrete(config: EngineConfig, name: str) -> int:
    value = getattr(config, name)
    if value is None:
        raise ConfigError(f"{name}=None: the scheduler needs a resolved config; set {name}")
    return int(value)


class Scheduler:
    """Decides what runs in each step and keeps the state of all requests.

    Args:
        config: resolved; block_size, num_blocks, max_num_batched_tokens, max_num_seqs
            and max_model_len are set.
        hash_fn: hash of the prefix cache; any function is safe, a good one is fast.

    Raises:
        ConfigError: a setting that is None, or a budget below max_model_len without
            chunked prefill.
    """

    def __init__(self, config: EngineConfig, hash_fn: HashFn = blake2b_128) -> None:
        self._max_model_len = _concrete(config, "max_model_len")
        self._token_budget = _concrete(config, "max_num_batched_tokens")
        self._max_num_seqs = _concrete(config, "max_num_seqs")
        self._chunked = config.enable_chunked_prefill
        self._debug = config.debug_checks
        self._look_ahead = config.async_scheduling
        if not self._chunked and self._token_budget < self._max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self._token_budget} is below max_model_len="
                f"{self._max_model_len}; without chunked prefill a whole prompt must fit one step"
            )
        num_blocks, block_size = _concrete(config, "num_blocks"), _concrete(config, "block_size")
        self.kv = KVCacheManager(
            num_blocks,
            block_size,
            config.enable_prefix_caching,
            hash_fn,
            config.enable_partial_block_reuse,
            config.max_pinned_share,
        )
        self._capacity = self.kv.capacity
        self._watermark = max(1, num_blocks // 100)  # spare blocks so that decodes can grow
        self._accountant = Accountant()
        self._waiting = self._build_queue(config.schedule)
        self._hold_back = HoldBack(self.kv, config.max_held_steps)
        self._running: dict[RequestId, Request] = {}  # in order of admission
        self._requests: dict[RequestId, Request] = {}  # all unfinished ones
        self._in_flight: dict[RequestId, Request] = {}
        self._planned: SchedulerOutput | None = None
        self._ended_in_flight: list[Request] = []  # finished while their step runs
        self._removed: list[RequestId] = []
        self._step = 0
        self.cached_tokens_last_step = 0  # prompt tokens newly taken from the cache

    @property
    def ledger(self) -> TokenLedger:
        return self._accountant.ledger

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def blocks_used(self) -> int:
        """Blocks that requests hold; cached blocks nobody holds are not among them."""
        return self.kv.pool.num_referenced

    @property
    def blocks_total(self) -> int:
        return len(self.kv.pool.blocks)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestTooLongError: it can never fit; names both numbers.
            InvalidRequestError: empty prompt, bad token ids, or the id of a live request.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"request_id={request.request_id!r} belongs to an unfinished request; "
                "use another id, or abort that one first",
                "request_id",
            )
        check_can_ever_run(request, self._max_model_len, self.blocks_total, self.kv.block_size)
        try:
            self.kv.prepare(request)
        except InvalidRequestError:
            self.kv.free(request)
            raise
        prepare_stops(request, self._max_model_len, self._capacity)
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step; may be empty, or only remove rows.

        The output must be run as it stands, whatever is finished meanwhile, and handed to
        `update_from_output`; a step that fails as a whole counts as an error of each request.
        """
        assert not self._in_flight, "schedule() before update_from_output() of the last step"
        self._step += 1
        self.kv.step = self._step
        self.kv.pins.expire()
        preempted = self._make_room()
        plan = StepPlan(self._step, self._token_budget, self._removed)
        self._removed = []
        prefills = self._schedule_decodes(plan)
        self._schedule_prefills(plan, prefills)
        if not preempted:
            self._admit(plan)
        self._in_flight, self._planned = plan.requests, plan.output
        self.cached_tokens_last_step = plan.num_cached_tokens
        if self._debug:
            self.check_invariants()
        return plan.output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take in a step's results: append tokens, finish requests, make publications firm.

        Requests in ``runner_output.errors`` finish with reason ``error``; those that shared
        KV with them in this step are recomputed. Requests finished meanwhile are ignored.
        """
        in_flight, self._in_flight = self._in_flight, {}
        assert scheduler_output is self._planned, "update for another step"
        self._planned = None
        now = time.perf_counter()
        tainted = self._count(scheduler_output, in_flight, runner_output)
        outputs = [
            self._fail(in_flight[request_id], message, now)
            for request_id, message in runner_output.errors.items()
            if request_id in in_flight and not in_flight[request_id].is_finished
        ]
        for request in tainted:
            self._preempt(request)
        self.kv.commit()
        outputs += self._append_tokens(in_flight, runner_output.sampled, now)
        if runner_output.prompt_logprobs:
            for output in outputs:
                output.prompt_logprobs = runner_output.prompt_logprobs.get(output.request_id)
        if self._debug:
            self.check_invariants()
        return outputs

    def finish_request(
        self, request_id: RequestId, reason: FinishReason, stop_reason: int | str | None = None
    ) -> EngineCoreOutput | None:
        """End a request now, in any state (abort, stop string); None if it is not live."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._finish(request, Stop(reason, stop_reason), time.perf_counter())
        return _output(request, [])

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes and pins; False (and no change) while requests hold blocks."""
        return self.kv.reset()

    def pin(self, request: Request, ttl: float | None) -> Pin:
        """Keep what is cached of a prompt from eviction; see `KVCacheManager.pin`."""
        return self.kv.pin(request, ttl)

    def unpin(self, pin_id: int) -> bool:
        """Let go of a pin; False when there is none of this id (any more)."""
        self.kv.pins.expire()
        return self.kv.pins.remove(pin_id)

    def check_invariants(self) -> None:
        """Raise AssertionError unless blocks, queues and ledger agree."""
        self.kv.check(self._running.values())
        self.ledger.check()
        assert len(self._requests) == len(self._waiting) + len(self._running), "a request is lost"
        for request in self._requests.values():
            running = request.request_id in self._running
            assert running == (request.status is RequestStatus.RUNNING), request
            assert running or not request.block_ids, request
            assert request.num_computed_tokens <= request.num_tokens, request
            assert request.num_cached_tokens < request.num_prompt_tokens, request

    def _build_queue(self, schedule: str) -> WaitingQueue:
        if schedule == "prefix":
            return PrefixQueue(lambda request: self.kv.lookup(request).num_tokens)
        return WaitingQueue()

    def _make_room(self) -> bool:
        """Preempt until each running request can advance by a token; True if any was."""
        if len(self._running) <= self.kv.num_available_blocks:
            return False
        preempted = False
        while self._blocks_due() > self.kv.num_available_blocks:
            if len(self._running) == 1 and self.kv.pins.drop_oldest():
                continue  # pins yield to a request that could not go on otherwise
            # newest first, so that min() settles ties by the latest admission
            self._preempt(min(reversed(self._running.values()), key=self.kv.tokens_lost))
            preempted = True
        return preempted

    def _blocks_due(self) -> int:
        size = self.kv.block_size
        return sum(
            len(request.block_ids) * size <= request.num_computed_tokens
            for request in self._running.values()
        )

    def _preempt(self, request: Request) -> None:
        self._accountant.preempted(request)
        self.kv.release(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        request.metrics.num_preemptions += 1
        del self._running[request.request_id]
        self._removed.append(request.request_id)
        self._waiting.add_front(request)

    def _schedule_decodes(self, plan: StepPlan) -> list[Request]:
        """Schedule all decodes; return the running requests that are still in prefill."""
        prefills: list[Request] = []
        decodes: dict[RequestId, Request] = {}
        messages: list[CachedRequestData] = []
        size = self.kv.block_size
        for request_id, request in self._running.items():  # the hot loop
            computed = request.num_computed_tokens
            if computed < len(request.prompt_token_ids) or len(request.token_ids) - computed > 1:
                prefills.append(request)
                continue
            inside_last_block = 0 < computed % size < size - 1
            new_block_ids = [] if inside_last_block else self._grow(request)
            decodes[request_id] = request
            messages.append(CachedRequestData(request_id, new_block_ids, computed))
        assert len(decodes) <= plan.budget, "more running requests than the step has tokens"
        plan.add_decodes(decodes, messages)
        return prefills

    def _grow(self, request: Request) -> list[BlockId]:
        """The blocks of a decode whose token is the first or the last of a block."""
        new_block_ids = self.kv.allocate(request, 1)
        assert new_block_ids is not None, "a decode was left without a block"
        if self._look_ahead and not (request.num_computed_tokens + 1) % self.kv.block_size:
            spare = self._watermark + len(self._running)
            new_block_ids += self.kv.reserve_next(request, spare)
        return new_block_ids

    def _schedule_prefills(self, plan: StepPlan, prefills: list[Request]) -> None:
        for request in prefills:
            left = request.num_tokens - request.num_computed_tokens
            num_tokens = min(left, plan.budget, self.kv.room(request))
            if num_tokens == 0:
                continue
            new_block_ids = self.kv.allocate(request, num_tokens)
            assert new_block_ids is not None, "room() promised blocks"
            plan.add_prefill(request, new_block_ids, num_tokens)

    def _admit(self, plan: StepPlan) -> None:
        """Admit waiting requests in order while budget, rows and blocks last.

        One whose prefix is just being computed is held back; those behind it may pass. A
        request enters only if all its known tokens and a watermark fit; alone it may
        take the whole pool. Budget is left only when each running request got a token (and
        each running prefill all of its own), so there are never more of them than tokens,
        and no block is promised twice.
        """
        seats = self._max_num_seqs - len(self._running)
        if not plan.budget or not self._waiting or not seats:
            return
        for request in self._waiting.candidates(seats + _MAX_HELD_LOOKED_AT):
            if not plan.budget or len(self._running) >= self._max_num_seqs:
                return
            hit = self.kv.lookup(request)
            if self._hold_back.waits(request, hit, plan, len(self._waiting)):
                self._accountant.held(request)
                continue
            left = request.num_tokens - hit.num_tokens
            if left > plan.budget and not self._chunked:
                return
            while not self.kv.fits(request, hit, self._watermark if self._running else 0):
                if self._running or not self.kv.pins.drop_oldest():
                    return
            self._start(plan, request, hit, min(left, plan.budget))

    def _start(self, plan: StepPlan, request: Request, hit: PrefixHit, num_tokens: int) -> None:
        self._waiting.admitted(request.request_id)
        cached_before = request.num_cached_tokens
        if request.status is RequestStatus.PREEMPTED:
            self._accountant.resumed(request, hit)
        else:
            report = explain(self.kv, request, hit)
            self._accountant.admitted(request, hit, report)
            request.metrics.first_scheduled_time = time.perf_counter()
        plan.num_cached_tokens += request.num_cached_tokens - cached_before
        request.status = RequestStatus.RUNNING
        self._running[request.request_id] = request
        new_block_ids = self.kv.allocate(request, num_tokens, hit)
        assert new_block_ids is not None, "fits() promised blocks"
        plan.add_new(request, num_tokens, self.kv.copy_of(request, hit))

    def _count(
        self,
        scheduler_output: SchedulerOutput,
        in_flight: Mapping[RequestId, Request],
        runner_output: ModelRunnerOutput,
    ) -> list[Request]:
        """Book the tokens that ran and move requests on; return those that ran on bad KV."""
        errors, scheduled = runner_output.errors, scheduler_output.num_scheduled_tokens
        # A runner that fails a request before its forward pass reports fewer tokens
        num_tokens = scheduler_output.total_num_scheduled_tokens
        all_ran = not errors or runner_output.num_forward_tokens >= num_tokens
        rows = list(in_flight.values())
        num_decodes = 0 if errors else scheduler_output.num_decode_tokens  # the first rows
        self._accountant.decoded(rows[:num_decodes])
        for request in rows[:num_decodes]:
            request.num_computed_tokens += 1
        for request in rows[num_decodes:]:
            if all_ran or request.request_id not in errors:
                self._accountant.ran(request, scheduled[request.request_id])
                request.num_computed_tokens += scheduled[request.request_id]
        for request in self._ended_in_flight:
            self._accountant.closed(request)
        self._ended_in_flight.clear()
        if not errors:
            return []
        bad = self.kv.retract(errors)
        return [
            request
            for request in rows
            if request.request_id not in errors and not bad.isdisjoint(request.block_ids)
        ]

    def _fail(self, request: Request, message: str, now: float) -> EngineCoreOutput:
        self._finish(request, Stop(FinishReason.ERROR), now)
        output = _output(request, [])
        output.error = message
        return output

    def _append_tokens(
        self,
        in_flight: Mapping[RequestId, Request],
        sampled: Mapping[RequestId, SampledToken],
        now: float,
    ) -> Iterator[EngineCoreOutput]:
        """Give each request that still runs its new token; one that was due and got none fails."""
        running = RequestStatus.RUNNING
        for request_id, request in in_flight.items():  # the hot loop
            if request.status is not running:  # finished meanwhile, failed or preempted
                continue
            token = sampled.get(request_id)
            if token is None:
                if request.num_computed_tokens == len(request.token_ids):
                    yield self._fail(request, _NOT_SAMPLED, now)
                continue
            metrics, token_id = request.metrics, token.token_id
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            metrics.token_times.append(now)
            token_ids = request.token_ids
            token_ids.append(token_id)
            if len(token_ids) >= request.length_limit or token_id in request.end_ids:
                stop = check_stop(request, self._max_model_len, self._capacity)
                if stop is not None:
                    self._finish(request, stop, now)
            logprobs = None if token.logprobs is None else [token.logprobs]
            yield EngineCoreOutput(  # `_output`, without the call
                request_id,
                [token_id],
                logprobs,
                None,
                request.finish_reason,
                request.stop_reason,
                request.num_cached_tokens,
                None,
                metrics,
                request.cache_report,
            )

    def _finish(self, request: Request, stop: Stop, now: float) -> None:
        request_id = request.request_id
        if request.status is RequestStatus.RUNNING:
            del self._running[request_id]
            self._removed.append(request_id)
        else:
            self._waiting.remove(request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = stop
        request.metrics.finished_time = now
        self.kv.free(request)
        del self._requests[request_id]
        if self._in_flight.get(request_id) is request:
            self._ended_in_flight.append(request)  # closed when the step is counted
        elif request.metrics.first_scheduled_time is not None:
            self._accountant.closed(request)


def _output(
    request: Request, new_token_ids: list[int], logprobs: list[TokenLogprobs] | None = None
) -> EngineCoreOutput:
    return EngineCoreOutput(  # positional: twice as fast, once per request and step
        request.request_id,
        new_token_ids,
        logprobs,
        None,  # prompt_logprobs
        request.finish_reason,
        request.stop_reason,
        request.num_cached_tokens,
        None,  # error
        request.metrics,
        request.cache_report,
    )
