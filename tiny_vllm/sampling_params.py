"""What a caller asks of the sampler, validated once at construction.

Owns names, defaults and bounds (they follow vLLM). Knows nothing of tensors.
"""

import difflib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tiny_vllm.errors import InvalidRequestError

MAX_LOGPROBS = 100
MAX_N = 256
MAX_STOP = 64


def _check_number(
    name: str, value: Any, low: float, high: float, *, low_open: bool = False
) -> None:
    bound = f"{'(' if low_open else '['}{low:g}, {high:g}{']' if math.isfinite(high) else ')'}"
    # Unequal to itself: NaN. math.isnan would overflow on a huge integer.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise InvalidRequestError(f"{name} must be a number in {bound}, got {value!r}", name)
    if value < low or value > high or (low_open and value == low):
        raise InvalidRequestError(f"{name}={value!r} is out of range: it must be in {bound}", name)


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    bound = f">= {low}" if high is None else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer {bound}, got {value!r}", name)
    if value < low or (high is not None and value > high):
        raise InvalidRequestError(f"{name}={value} is out of range: it must be {bound}", name)


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """The entries of a list-like field; None is empty. A mapping or a scalar is refused."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be a list, got {value!r}", name)
    return tuple(value)


def _named_errors(cls: type) -> Any:
    """Let an unknown keyword raise InvalidRequestError with the nearest name."""
    generated, known = cls.__init__, [f.name for f in fields(cls)]  # type: ignore[misc]

    @functools.wraps(generated)
    def init(self: Any, **values: Any) -> None:
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise InvalidRequestError(f"unknown {cls.__name__} key {key!r}; {hint}", key)
        generated(self, **values)

    cls.__init__ = init  # type: ignore[misc]
    return cls


@_named_errors
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        n: number of independent completions of the prompt.
        temperature: 0 is greedy (arg-max, ties to the lowest token id).
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches ``top_p``.
        min_p: drop tokens less likely than ``min_p`` times the most likely one.
        repetition_penalty: > 1 discourages tokens of prompt and output (CTRL paper).
        presence_penalty, frequency_penalty: OpenAI's additive penalties on output tokens.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        seed: makes the request's random draws reproducible; None takes one that follows
            from the engine's seed and the request's id.
        max_tokens: output limit; None runs to the context limit.
        min_tokens: no end-of-sequence, stop id or stop string before this many tokens.
        stop: strings that end the output; the text ends before them.
        stop_token_ids: ids that end the output.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: number of most likely tokens reported per output token.
        prompt_logprobs: the same per prompt token (the first is None).
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequestError: names the field, the value and the bound.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = field(default_factory=tuple)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_int("top_k", self.top_k, -1)
        _check_int("min_tokens", self.min_tokens, 0)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}",
                    "min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"{name} must be True or False, got {getattr(self, name)!r}", name
                )
        object.__setattr__(self, "stop", self._stop_tuple())
        object.__setattr__(self, "stop_token_ids", self._stop_id_tuple())
        self._check_logit_bias()

    def _stop_tuple(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        if len(stop) > MAX_STOP:
            raise InvalidRequestError(
                f"stop has {len(stop)} strings, the limit is {MAX_STOP}", "stop"
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop must hold non-empty strings, got {text!r}", "stop")
        return stop

    def _stop_id_tuple(self) -> tuple[int, ...]:
        token_ids = _items("stop_token_ids", self.stop_token_ids)
        for token_id in token_ids:
            _check_int("stop_token_ids", token_id, 0)
        return token_ids

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}", "logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias token id", token_id, 0)
            _check_number("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever form the caller used."""
        return tuple(self.stop or ())

    def replace(self, **changes: Any) -> "SamplingParams":
        """Return a copy with some fields changed, validated again."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(**{**values, **changes})
