"""What the engine gives back: plain data, safe to keep after the engine is gone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # refused or failed; RequestOutput.error says why

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token, its rank (1 = most likely) and its text if known."""

    logprob: float
    rank: int
    decoded_token: str | None = None


# One entry per token: the sampled token first, then the most likely ones.
TokenLogprobs = Mapping[int, Logprob]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request on the ``time.perf_counter`` clock, in seconds."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt. ``text`` and ``token_ids`` hold everything so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request; ``finished`` is True in the last one.

    ``num_cached_tokens`` counts prompt tokens taken from the prefix cache;
    ``cache_report`` says where the rest of the prompt came from.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    cache_report: Mapping[str, Any] | None = None
    error: str | None = None
