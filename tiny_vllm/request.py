"""A request as the core sees it: token ids, counters and a state; no text, no torch.

Invariants: ``num_computed_tokens <= num_tokens``; ``token_ids`` is prompt + output
and only grows; ``num_cached_tokens <= num_prompt_tokens - 1``.

    token_ids   [ prompt ........................ | output ......... ]
                  ^cached^ <- computed -> ^num_computed_tokens   ^num_tokens
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from tiny_vllm.cache_report import CacheReport
from tiny_vllm.outputs import FinishReason, RequestMetrics
from tiny_vllm.sampling_params import SamplingParams

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)


class RequestStatus(Enum):
    """Life of a request: WAITING -> RUNNING -> FINISHED, with PREEMPTED back to the queue."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to complete.

    Attributes:
        token_ids: prompt and output tokens, in one list.
        num_computed_tokens: tokens whose KV is in the cache (computed or cached).
        num_cached_tokens: prompt tokens taken from the prefix cache at first admission.
        block_ids: the block table, in order.
        block_hashes: hash chain of the full blocks, computed once and extended.
        cache_salt, adapter: separate key fields of the hash chain.
        num_held_steps: steps it waited for others to compute its prefix.
        use_prefix_cache: False bypasses look-ups (prompt log-probabilities do).
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int  # resolved: never None, prompt + max_tokens <= max_model_len
    arrival_time: float = field(default_factory=time.perf_counter)
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    adapter: str | None = None
    use_prefix_cache: bool = True
    packed_prompt: bytes | None = None  # as `core.block_hash.pack_tokens` makes it, if at hand

    token_ids: list[int] = field(init=False)
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    block_ids: list[BlockId] = field(init=False, default_factory=list)
    block_hashes: list[BlockHash] = field(init=False, default_factory=list)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)
    metrics: RequestMetrics = field(init=False)
    length_limit: int = field(init=False, default=0)  # tokens; `core.stop` sets both
    end_ids: frozenset[int] = field(init=False, default=frozenset())
    num_held_steps: int = field(init=False, default=0)
    cache_report: CacheReport | None = field(init=False, default=None)  # from admission on

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.metrics = RequestMetrics(arrival_time=self.arrival_time)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_preemptions(self) -> int:
        return self.metrics.num_preemptions

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
