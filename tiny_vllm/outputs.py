"""What the engine gives back: plain data, safe to keep after the engine is gone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from tiny_vllm.cache_report import CacheReport


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


class GrowingCompletion(Protocol):
    """A completion in the making, which can tell what it was at an earlier length."""

    def snapshot(self, num_tokens: int, text_length: int) -> CompletionOutput: ...


class _DeferredOutputs:
    """Builds ``outputs`` at its first read: nobody looks at those of most steps.

    ``_at_step`` holds the growing completion and its lengths (tokens, characters) at the
    step; whenever it is read, the list is what it would have been then.
    """

    __slots__ = ("_at_step",)
    _at_step: tuple[GrowingCompletion, int, int]

    if not TYPE_CHECKING:  # mypy would take any misspelt attribute for this one

        def __getattr__(self, name: str) -> Any:
            """Python asks here for what was never set."""
            if name != "outputs":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            growing, num_tokens, text_length = self._at_step
            self.outputs = [growing.snapshot(num_tokens, text_length)]
            del self._at_step
            return self.outputs


@dataclass(slots=True)
class RequestOutput(_DeferredOutputs):
    """The state of one request; ``finished`` is True in the last one.

    ``num_cached_tokens`` counts prompt tokens taken from the prefix cache;
    ``cache_report`` says why the rest of the prompt had to be computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    cache_report: CacheReport | None = None
    error: str | None = None

    @classmethod
    def deferred(
        cls,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        growing: GrowingCompletion,
        num_tokens: int,
        text_length: int,
        num_cached_tokens: int,
        prompt_logprobs: list[TokenLogprobs | None] | None,
        metrics: RequestMetrics,
        cache_report: CacheReport | None,
    ) -> "RequestOutput":
        """The output of an unfinished request; ``outputs`` is built when it is first read."""
        self = cls.__new__(cls)  # the generated __init__ would set ``outputs``
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.finished = False
        self.num_cached_tokens = num_cached_tokens
        self.prompt_logprobs = prompt_logprobs
        self.metrics = metrics
        self.cache_report = cache_report
        self.error = None
        # mypy overlooks the slots of the base class
        self._at_step = growing, num_tokens, text_length  # type: ignore[misc]
        return self

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all completions so far, without building ``outputs``."""
        try:
            return self._at_step[1]
        except AttributeError:
            return sum(len(completion.token_ids) for completion in self.outputs)


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix kept in the cache: what to `unpin`, and how much of the prompt it covers."""

    pin_id: int
    num_tokens: int
    num_blocks: int
