"""Request traces: one `TraceRequest` per line of a JSONL file, read as a stream.

    {"prompt_token_ids": [1, 2] | "prompt": "text" | "messages": [...],
     "max_tokens": 16, "arrival": 0.5}

No torch, no tokenizer. A bad line is a TraceError that names file, line and field.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_vllm.errors import TraceError

PROMPT_FIELDS = ("prompt_token_ids", "prompt", "messages")
FIELD_HELP = {
    "prompt_token_ids": "the prompt as a list of token ids of the model's vocabulary",
    "prompt": "or the prompt as text; the model's tokenizer makes the ids",
    "messages": "or a chat: a list of objects with the strings `role` and `content`",
    "max_tokens": "needed: tokens to generate, a whole number from 1; end-of-sequence is ignored",
    "arrival": "optional: seconds after the start of the trace, a number from 0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace; exactly one of the three prompt forms is set.

    Attributes:
        max_tokens: output length; end-of-sequence tokens do not end a benchmark request.
        arrival: seconds after the start of the trace, None when not recorded.
    """

    request_id: str
    max_tokens: int
    prompt_token_ids: Sequence[int] | None = None
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    arrival: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length in tokens.

        Raises:
            TraceError: the prompt is text that was not tokenized yet.
        """
        return len(self.token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt's token ids; TraceError while the prompt is text."""
        if self.prompt_token_ids is None:
            raise TraceError(f"request {self.request_id!r} holds text: tokenize the trace first")
        return self.prompt_token_ids


def read_trace(path: str | Path, vocab_size: int | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a JSONL file, one line at a time; blank lines are skipped.

    ``vocab_size`` bounds the token ids (None: only negative ids are refused). Request ids
    are the line numbers.

    Raises:
        TraceError: the file cannot be read, holds no request, or a line is wrong.
    """
    found = False
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found = True
                    yield _Line(f"{path}, line {number}", vocab_size).parse(line, number)
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8 text ({error.reason}); give a JSONL file") from error
    if not found:
        raise TraceError(f"{path} holds no request: give one JSON object per line")


@dataclass(frozen=True, slots=True)
class _Line:
    """Checks of one line; ``where`` opens every message."""

    where: str
    vocab_size: int | None

    def parse(self, line: str, number: int) -> TraceRequest:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{self.where}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise TraceError(f"{self.where}: a JSON object is needed, not {_kind(value)}")
        field = self._prompt_field(value)
        prompt: dict[str, Any] = {field: getattr(self, f"_{field}")(value[field])}
        return TraceRequest(
            request_id=str(number),
            max_tokens=self._max_tokens(value["max_tokens"]),
            arrival=self._arrival(value.get("arrival")),
            **prompt,
        )

    def _prompt_field(self, value: dict[str, Any]) -> str:
        """The one prompt field of a line; all that is missing is named at once."""
        present = [name for name in PROMPT_FIELDS if name in value]
        faults = []
        if len(present) != 1:
            faults.append(
                f"exactly one of the fields {', '.join(PROMPT_FIELDS)} is needed, "
                f"found {', '.join(present) or 'none'}"
            )
        if "max_tokens" not in value:
            faults.append("field 'max_tokens' is missing")
        if faults:
            unknown = [repr(str(name)) for name in value if name not in FIELD_HELP]
            hint = f" (unknown: {', '.join(unknown[:5])})" if unknown else ""
            raise TraceError(f"{self.where}: {'; '.join(faults)}{hint}")
        return present[0]

    def _wrong(self, field: str, message: str) -> TraceError:
        return TraceError(f"{self.where}: field {field!r} {message}")

    def _prompt_token_ids(self, value: Any) -> tuple[int, ...]:
        field = "prompt_token_ids"
        if not isinstance(value, list) or not value:
            raise self._wrong(field, f"must be a non-empty list of token ids, got {_kind(value)}")
        for position, token in enumerate(value):
            if type(token) is not int:
                raise self._wrong(field, f"holds {_kind(token)} at position {position}")
            if token < 0:
                raise self._wrong(field, f"holds the negative id {token} at position {position}")
            if self.vocab_size is not None and token >= self.vocab_size:
                raise self._wrong(
                    field,
                    f"holds the id {token} at position {position}, "
                    f"outside the model's vocabulary of {self.vocab_size}",
                )
        return tuple(value)

    def _prompt(self, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise self._wrong("prompt", f"must be a non-empty string, got {_kind(value)}")
        return value

    def _messages(self, value: Any) -> tuple[Mapping[str, Any], ...]:
        if not isinstance(value, list) or not value:
            raise self._wrong("messages", f"must be a non-empty list, got {_kind(value)}")
        for position, message in enumerate(value):
            fields = message if isinstance(message, dict) else {}
            if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
                raise self._wrong(
                    "messages", f"needs the strings role and content at position {position}"
                )
        return tuple(value)

    def _max_tokens(self, number: Any) -> int:
        if type(number) is not int or number < 1:
            shown = number if type(number) is int else _kind(number)
            raise self._wrong("max_tokens", f"must be a whole number >= 1, got {shown}")
        return number

    def _arrival(self, value: Any) -> float | None:
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            shown = value if type(value) in (int, float) else _kind(value)
            raise self._wrong("arrival", f"must be seconds >= 0, got {shown}")
        return float(value)


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, str):
        return f"the string {value[:40]!r}" if value else "an empty string"
    if isinstance(value, dict):
        return "an object"
    return json.dumps(value)


def trace_sha256(requests: Iterable[TraceRequest]) -> str:
    """Hash of everything an engine sees: token ids, output lengths and arrivals."""
    digest = hashlib.sha256()
    for request in requests:
        row = [list(request.token_ids), request.max_tokens, request.arrival]
        digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()
