"""A model runner without a model: the scheduler's messages are believed only if they prove right.

The "KV" of a position is a fingerprint of the whole prefix up to it. A step first writes
the KV of all its rows, then reads, as the data plane does in each layer; before a token is
sampled every position of the context must hold the fingerprint of the row's own tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tiny_vllm.config import EngineConfig
from tiny_vllm.core.block_hash import HashFn, blake2b_128
from tiny_vllm.core.scheduler import Scheduler
from tiny_vllm.outputs import FinishReason
from tiny_vllm.protocol import (
    CachedRequestData,
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    SampledToken,
    SchedulerOutput,
)
from tiny_vllm.request import Request, RequestId
from tiny_vllm.sampling_params import SamplingParams

VOCAB = 97
GARBAGE = -1  # KV and tokens that come from KV that was never computed


def fingerprints(token_ids: Iterable[int], start: int = 17) -> list[int]:
    """One number per position that depends on all tokens up to it."""
    prints = []
    for token_id in token_ids:
        start = (start * 6364136223846793005 + token_id + 1442695040888963407) % 2**61
        prints.append(start)
    return prints


def next_token(fingerprint: int) -> int:
    return (fingerprint >> 20) % VOCAB


def solo(prompt: Sequence[int], num_tokens: int, eos: int | None = None) -> list[int]:
    """The output of a request that has the model to itself."""
    output: list[int] = []
    state = fingerprints(prompt)[-1]
    while len(output) < num_tokens and (not output or output[-1] != eos):
        output.append(next_token(state))
        state = fingerprints([output[-1]], state)[-1]
    return output


@dataclass
class Row:
    """One request as the runner holds it."""

    token_ids: list[int]
    prints: list[int]
    block_ids: list[int]
    num_computed: int

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.prints += fingerprints([token_id], self.prints[-1])


@dataclass
class FakeRunner:
    """Implements `ModelRunner`. ``fail[request_id] = message`` fails a request's next step."""

    block_size: int
    rows: dict[str, Row] = field(default_factory=dict)
    kv: dict[int, int] = field(default_factory=dict)  # slot -> fingerprint
    fail: dict[str, str] = field(default_factory=dict)
    fail_before_forward: bool = True
    num_forward_tokens: int = 0
    steps: list[SchedulerOutput] = field(default_factory=list)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(scheduler_output)
        self._update_rows(scheduler_output)
        self._copy(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        errors = {i: self.fail.pop(i) for i in list(scheduled) if i in self.fail}
        result = ModelRunnerOutput(errors=errors)
        written: set[int] = set()
        for request_id, num_tokens in scheduled.items():
            failed = request_id in errors
            self._write(self.rows[request_id], num_tokens, written, failed, bool(errors))
            if not (failed and self.fail_before_forward):
                result.num_forward_tokens += num_tokens
        for request_id in scheduled:
            row = self.rows[request_id]
            if request_id not in errors and row.num_computed == len(row.token_ids):
                result.sampled[request_id] = self._sample(request_id, row, bool(errors))
        self.num_forward_tokens += result.num_forward_tokens
        return result

    def _update_rows(self, step: SchedulerOutput) -> None:
        for removed_id in step.removed_request_ids:
            del self.rows[removed_id]
        for new in step.new_requests:
            self._add_row(new)
        for cached in step.cached_requests:
            self._extend_row(cached)
        named = [d.request_id for d in [*step.cached_requests, *step.new_requests]]
        assert sorted(named) == sorted(step.num_scheduled_tokens)
        total = sum(step.num_scheduled_tokens.values())
        assert total == step.num_decode_tokens + step.num_prefill_tokens

    def _add_row(self, new: NewRequestData) -> None:
        assert new.request_id not in self.rows, f"{new.request_id} is already held"
        tokens = list(new.token_ids)
        row = Row(tokens, fingerprints(tokens), list(new.block_ids), new.num_computed_tokens)
        self.rows[new.request_id] = row

    def _extend_row(self, cached: CachedRequestData) -> None:
        row = self.rows[cached.request_id]
        row.block_ids += cached.new_block_ids
        assert row.num_computed == cached.num_computed_tokens

    def _copy(self, step: SchedulerOutput) -> None:
        found: dict[int, int] = {}
        for source, target, num_tokens in step.block_copies:
            assert 0 < num_tokens < self.block_size
            for i in range(num_tokens):
                assert source * self.block_size + i in self.kv, "a copy of what was never computed"
                found[target * self.block_size + i] = self.kv[source * self.block_size + i]
        self.kv |= found

    def _slot(self, row: Row, position: int) -> int:
        return row.block_ids[position // self.block_size] * self.block_size + (
            position % self.block_size
        )

    def _write(
        self, row: Row, num_tokens: int, written: set[int], failed: bool, any_error: bool
    ) -> None:
        assert num_tokens >= 1
        start, end = row.num_computed, row.num_computed + num_tokens
        assert end <= len(row.token_ids), "more tokens scheduled than there are"
        sound = not failed and (not any_error or self._holds(row, start))
        for position in range(start, end):
            slot = self._slot(row, position)
            assert slot not in written, f"slot {slot} is written twice in one step"
            written.add(slot)
            self.kv[slot] = row.prints[position] if sound else GARBAGE
        row.num_computed = end

    def _holds(self, row: Row, end: int) -> bool:
        kv, slot = self.kv, self._slot
        return all(kv.get(slot(row, p)) == row.prints[p] for p in range(end))

    def _sample(self, request_id: str, row: Row, any_error: bool) -> SampledToken:
        sound = self._holds(row, row.num_computed)
        assert sound or any_error, f"{request_id} reads KV that is not its own"
        token_id = next_token(row.prints[-1]) if sound else GARBAGE
        row.append(token_id)
        return SampledToken(token_id)


def make_config(**changes: object) -> EngineConfig:
    """A small resolved config with the run-time checks on."""
    values: dict[str, object] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 64,
        "max_model_len": 4096,
        "debug_checks": True,
    }
    return EngineConfig.create(**{**values, **changes})


def make_request(
    request_id: str, prompt: Sequence[int], max_tokens: int | None = 4, **fields: object
) -> Request:
    """A greedy request. Fields of `SamplingParams` and of `Request` are told apart by name."""
    own = ("eos_token_ids", "cache_salt", "adapter", "use_prefix_cache")
    kept = {k: v for k, v in fields.items() if k in own}
    rest = {k: v for k, v in fields.items() if k not in own}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **rest)
    limit = 4096 - len(prompt) if max_tokens is None else max_tokens
    return Request(RequestId(request_id), list(prompt), params, limit, **kept)


class Driver:
    """A scheduler and a fake runner in a loop; collects what each request was given."""

    def __init__(self, hash_fn: HashFn = blake2b_128, **changes: object) -> None:
        config = make_config(**changes)
        self.scheduler = Scheduler(config, hash_fn)
        self.runner = FakeRunner(config.block_size or 0)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, EngineCoreOutput] = {}

    def add(self, request_id: str, prompt: Sequence[int], *args: int | None, **kw: object) -> None:
        request = make_request(request_id, prompt, *args, **kw)
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        self.tokens[request_id] = []
        self.finished.pop(request_id, None)  # an id may be used again

    def step(self) -> SchedulerOutput:
        planned = self.scheduler.schedule()
        self.update(planned)
        return planned

    def update(self, planned: SchedulerOutput) -> None:
        """Run a step planned before and take in its results."""
        outputs = self.scheduler.update_from_output(planned, self.runner.execute(planned))
        assert len({o.request_id for o in outputs}) == len(outputs)
        for output in outputs:
            self.take(output)

    def take(self, output: EngineCoreOutput | None) -> None:
        if output is None:
            return
        assert output.request_id not in self.finished, "an output after the last one"
        self.tokens[output.request_id] += output.new_token_ids
        if output.finish_reason is not None:
            self.finished[output.request_id] = output

    def abort(self, request_id: str) -> None:
        self.take(self.scheduler.finish_request(RequestId(request_id), FinishReason.ABORT))

    def run(self, max_steps: int = 5000) -> "Driver":
        """Step until nothing is left; every step must do something."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                self.check_idle()
                return self
            assert self.step().total_num_scheduled_tokens > 0, "an empty step with work to do"
        raise AssertionError(f"not done after {max_steps} steps")

    def check_idle(self) -> None:
        """With no request left, no block is held (but by pins) and the books balance."""
        assert self.scheduler.blocks_used == self.scheduler.kv.pins.num_blocks
        assert self.scheduler.ledger.pending_tokens == 0
        assert self.scheduler.ledger.forward_tokens == self.runner.num_forward_tokens
        self.scheduler.check_invariants()

    def generate(self, request_id: str, prompt: Sequence[int], *args: int, **kw: object) -> Request:
        """Run one request to its end."""
        self.add(request_id, prompt, *args, **kw)
        self.run()
        return self.requests[request_id]

    def assert_solo(self, *request_ids: str) -> None:
        """The outputs equal those of requests that run alone."""
        for request_id in request_ids or tuple(self.requests):
            request = self.requests[request_id]
            expected = solo(request.prompt_token_ids, request.max_tokens)
            assert self.tokens[request_id] == expected, request_id
            assert request.output_token_ids == expected, request_id
