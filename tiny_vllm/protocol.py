"""Messages between the parts, and the two protocols programs rely on.

Scheduler -> runner: `SchedulerOutput`. Runner -> scheduler: `ModelRunnerOutput`.
Core -> front end: `EngineCoreOutput`. Everything here is plain data.

A request's row in a step:

    [0 .. num_computed) KV exists | [num_computed .. +num_scheduled) run now | not yet
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tiny_vllm.cache_report import CacheReport, MissReason
from tiny_vllm.outputs import FinishReason, RequestMetrics, RequestOutput, TokenLogprobs
from tiny_vllm.request import BlockId, RequestId
from tiny_vllm.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """A request the runner sees for the first time, or again after preemption."""

    request_id: RequestId
    prompt_token_ids: Sequence[int]  # shared with the request: nobody changes it
    output_token_ids: list[int]  # so far; empty unless resumed
    params: SamplingParams
    block_ids: list[BlockId]  # the whole block table so far
    num_computed_tokens: int
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far, a copy."""
        return [*self.prompt_token_ids, *self.output_token_ids]


@dataclass(slots=True)
class CachedRequestData:
    """A request the runner already holds: only what changed since its last step."""

    request_id: RequestId
    new_block_ids: list[BlockId]
    num_computed_tokens: int


class BlockCopy(NamedTuple):
    """Copy the KV of the first ``num_tokens`` tokens of one block to another."""

    source: BlockId
    target: BlockId
    num_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step. ``num_scheduled_tokens`` gives the order of the batch.

    ``block_copies`` come before everything else, all read before any is written.

    The runner samples for each request whose scheduled tokens reach the end of its
    known tokens, and appends the sampled token to its own copy of the request.
    """

    step: int = 0
    new_requests: list[NewRequestData] = field(default_factory=list)
    cached_requests: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[RequestId, int] = field(default_factory=dict)
    removed_request_ids: list[RequestId] = field(default_factory=list)  # finished or preempted
    block_copies: list[BlockCopy] = field(default_factory=list)
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0

    @property
    def total_num_scheduled_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens


@dataclass(slots=True)
class SampledToken:
    """One sampled token and, if asked for, its log-probabilities (sampled token first)."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class KvBytes:
    """KV-cache bytes of a step: as per-request attention would read, and as the plan reads."""

    logical: int = 0
    physical: int = 0


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step produced. ``num_forward_tokens`` counts positions really run."""

    sampled: dict[RequestId, SampledToken] = field(default_factory=dict)
    prompt_logprobs: dict[RequestId, list[TokenLogprobs | None]] = field(default_factory=dict)
    errors: dict[RequestId, str] = field(default_factory=dict)
    num_forward_tokens: int = 0
    num_logit_rows: int = 0  # rows that went through the output projection
    kv_bytes: KvBytes = field(default_factory=KvBytes)
    # sum over the step's tokens of the context each attends to: the FLOPs of attention
    attention_context_tokens: int = 0


@dataclass(slots=True)
class EngineCoreOutput:
    """New tokens of one request; exactly one output of a request carries a finish reason."""

    request_id: RequestId
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics | None = None
    cache_report: CacheReport | None = None


class ModelRunner(Protocol):
    """Runs one step. The data plane implements it; tests put a fake model in its place."""

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...


@dataclass(slots=True)
class StepRecord:
    """One engine step as `steps.jsonl` stores it. Times are perf_counter seconds."""

    step: int
    start: float
    end: float
    num_decode_tokens: int
    num_prefill_tokens: int
    num_requests: int
    num_sampled: int  # tokens that came out of the step
    num_waiting: int = 0
    num_cached_tokens: int = 0  # prompt tokens newly taken from the prefix cache
    blocks_used: int = 0
    blocks_total: int = 0
    kv_bytes: KvBytes = field(default_factory=KvBytes)
    attention_context_tokens: int = 0
    num_logit_rows: int = 0

    @property
    def kind(self) -> str:
        """`decode`, `prefill` or `mixed`."""
        if not self.num_prefill_tokens:
            return "decode"
        return "mixed" if self.num_decode_tokens else "prefill"


@dataclass(slots=True)
class TokenLedger:
    """Where every token went; the equations of `check` hold after every step.

    prompt_tokens counts admitted prompts; computed and cached split them once each is
    past its prefill. Look-ups are counted at first admission only; those after a
    preemption are the ``*_resumed`` fields. The ``missed_*`` fields split by reason what
    first look-ups did not find.
    """

    prompt_tokens: int = 0
    computed_tokens: int = 0  # prompt tokens run through the model the first time
    cached_tokens: int = 0  # prompt tokens taken from the cache at first admission
    copied_tokens: int = 0  # of these, tokens copied from a block that matched in part
    recomputed_tokens: int = 0  # tokens run again after a preemption
    decoded_tokens: int = 0  # output tokens fed back through the model the first time
    forward_tokens: int = 0
    pending_tokens: int = 0  # prompt tokens admitted, not yet computed
    dropped_tokens: int = 0  # prompt tokens of requests that ended before computing them
    blocks_asked: int = 0
    blocks_found: int = 0
    blocks_asked_resumed: int = 0
    blocks_found_resumed: int = 0
    cached_tokens_resumed: int = 0
    cached_tokens_late: int = 0  # of cached_tokens: not yet cached at first admission
    num_preemptions: int = 0
    held_requests: int = 0  # that waited for another one to compute their prefix
    held_steps: int = 0
    missed_cold: int = 0
    missed_evicted: int = 0
    missed_diverged: int = 0
    missed_below_block: int = 0
    missed_pending: int = 0
    missed_last_token: int = 0
    missed_salt: int = 0
    missed_disabled: int = 0

    def missed(self) -> dict[MissReason, int]:
        """Prompt tokens not found at first admission, by reason."""
        return {reason: getattr(self, f"missed_{reason.value}") for reason in MissReason}

    def add_misses(self, report: CacheReport) -> None:
        """Count a report's misses by reason."""
        for reason, count in report.missed_tokens().items():
            name = f"missed_{reason.value}"
            setattr(self, name, getattr(self, name) + count)

    def check(self) -> None:
        """Raise AssertionError with both sides when the books do not balance."""
        prompt = self.computed_tokens + self.cached_tokens + self.pending_tokens
        prompt += self.dropped_tokens
        assert self.prompt_tokens == prompt, f"prompt {self.prompt_tokens} != {prompt}: {self}"
        forward = self.computed_tokens + self.recomputed_tokens + self.decoded_tokens
        assert self.forward_tokens == forward, f"forward {self.forward_tokens} != {forward}: {self}"
        found = self.cached_tokens - self.cached_tokens_late
        asked = found + sum(self.missed().values())
        assert self.prompt_tokens == asked, f"found and missed {asked} of {self.prompt_tokens}"


@dataclass(slots=True)
class EngineInfo:
    """Facts of a built engine that reports need."""

    name: str
    device: str
    dtype: str
    config: dict[str, object]
    reasons: dict[str, str]
    num_parameters: int
    weight_bytes: int  # bytes one forward pass reads (tied matrices once, embedding rows not)
    kv_bytes_per_token: int
    linear_flops_per_token: int  # 2 x parameters of the layers' matrices
    lm_head_flops_per_token: int
    attention_flops_per_context_token: int  # per token and token of context, all layers
    vocab_size: int
    max_model_len: int


class Engine(Protocol):
    """An engine that `bench` can drive: the extended one, the baseline, or a peer."""

    info: EngineInfo
    ledger: TokenLedger
    last_step: StepRecord | None

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Queue a request. Raises InvalidRequestError; nothing else is disturbed then."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one step; return the requests that changed."""
        ...

    def has_unfinished_requests(self) -> bool: ...

    def abort(self, request_id: str) -> None:
        """Finish a request now with reason `abort`; unknown or finished ids are ignored."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when requests still hold blocks."""
        ...

    def shutdown(self) -> None: ...
