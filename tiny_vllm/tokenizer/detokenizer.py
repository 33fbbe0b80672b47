"""Streaming decode of one request: text as tokens come, cut at stop strings.

Invariants: `text` only grows; no part of a stop string is ever in it (unless asked for);
an incomplete character waits for its other bytes; nothing of the prompt is in it.

    bytes in -> [incomplete character] -> [text that may begin a stop string] -> shown text
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from tiny_vllm.tokenizer.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        stop: the string.
        num_tokens: how many tokens of this `append` count, the one that completed
            the stop string included; later ones must be dropped.
    """

    stop: str
    num_tokens: int


class StreamingDetokenizer:
    """Text of a growing list of output tokens, in amortised constant time per token.

    Args:
        prompt_token_ids: only their last bytes matter: a prompt may end inside a
            character, which the output then completes.
        stop: strings that end the output.
        include_stop_str: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: stop strings completed before this many output tokens do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._include_stop_str = include_stop_str
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._prompt_tail = _incomplete_tail(tokenizer, prompt_token_ids)
        self._at_start = tokenizer.strips_leading_space and not prompt_token_ids
        self._shown: list[str] = []
        self._not_taken: list[str] = []
        self._held = ""  # could begin a stop string
        self._num_tokens = 0
        self._ended = False

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def take(self) -> str:
        """Text that became visible since the last call."""
        delta = "".join(self._not_taken)
        self._not_taken.clear()
        return delta

    def append(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Add output tokens; return the stop string they complete, if any.

        After a match, and after `finish`, further tokens are ignored.
        """
        for count, token_id in enumerate(token_ids, start=1):
            if self._ended:
                return None
            self._num_tokens += 1
            stop = self._add_text(self._decode(token_id))
            if stop is not None:
                self._ended = True
                return StopMatch(stop, count)
        return None

    def finish(self) -> None:
        """The output ends here: show what was held back, an incomplete character as U+FFFD."""
        if not self._ended:
            self._ended = True
            self._show(self._held + self._decoder.decode(b"", final=True))
            self._held = ""

    def _decode(self, token_id: int) -> str:
        """Characters that this token completes."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        if self._prompt_tail and data:
            # The prompt's bytes count only if the output goes on with their character.
            if _continues(self._prompt_tail, data):
                data = self._prompt_tail + data
            self._prompt_tail = b""
        return self._decoder.decode(data)

    def _add_text(self, new: str) -> str | None:
        """Append text; show what cannot be part of a stop string. Return a stop string found."""
        pending = self._held + new
        if self._num_tokens >= self._min_tokens:
            start, stop = self._find_stop(pending, len(self._held))
            if stop is not None:
                self._show(pending[: start + (len(stop) if self._include_stop_str else 0)])
                self._held = ""
                return stop
        keep = self._num_to_hold(pending)
        self._show(pending[: len(pending) - keep])
        self._held = pending[len(pending) - keep :]
        return None

    def _find_stop(self, pending: str, num_old: int) -> tuple[int, str | None]:
        """First stop string that ends in the new text; (start, string) or (-1, None)."""
        best: tuple[int, str | None] = (-1, None)
        for stop in self._stop:
            start = pending.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best[1] is None or start < best[0]):
                best = (start, stop)
        return best

    def _num_to_hold(self, pending: str) -> int:
        """Length of the longest end of ``pending`` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(pending)), longest, -1):
                if pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._not_taken.append(text)


def _incomplete_tail(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """The first bytes of a character that the tokens end in the middle of."""
    data = b""
    for token_id in reversed(token_ids):
        data = tokenizer.token_bytes(token_id) + data
        if len(data) >= _MAX_CHARACTER_BYTES:
            break
    data = data[-_MAX_CHARACTER_BYTES:]
    _, used = codecs.utf_8_decode(data, "replace", False)
    return data[used:]


def _continues(tail: bytes, data: bytes) -> bool:
    """True when the first byte of ``data`` may follow ``tail`` within one character."""
    text, _ = codecs.utf_8_decode(tail + data[:1], "replace", False)
    return "\ufffd" not in text
