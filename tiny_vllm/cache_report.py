"""Where a prompt's tokens came from: the cache, or the model and why. Stdlib only.

A report covers the prompt without gap or overlap: first what was found, then ranges of
computed tokens, each with one reason.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

HIT = "hit"


class MissReason(str, Enum):
    """Why prompt tokens had to be computed."""

    COLD = "cold"  # nothing like them is in the cache, nor was it as far as is remembered
    EVICTED = "evicted"  # they were cached and had to make room
    DIVERGED = "diverged"  # an earlier request goes on with another token here
    BELOW_BLOCK = "below_block"  # less than a block in common, and parts are not reused
    PENDING = "pending"  # another request computes them in this very step
    LAST_TOKEN = "last_token"  # the last token is always computed: its logits are needed
    SALT = "salt"  # cached, but under another salt or adapter
    DISABLED = "disabled"  # the cache is off, or the request bypasses it

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class CacheRange:
    """Prompt tokens [start, end).

    Attributes:
        reason: None where they were found.
        detail: facts of the reason, by name; see `CacheReport.describe` for their use.
    """

    start: int
    end: int
    reason: MissReason | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the reason of what was found is ``hit``."""
        reason = HIT if self.reason is None else self.reason.value
        return {"start": self.start, "end": self.end, "reason": reason, **self.detail}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "CacheRange":
        detail = {k: v for k, v in row.items() if k not in ("start", "end", "reason")}
        reason = None if row["reason"] == HIT else MissReason(row["reason"])
        return cls(row["start"], row["end"], reason, detail)


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The look-up at a request's admission.

    Attributes:
        ranges: cover [0, prompt tokens) in order.
        copied_tokens: of those found, tokens copied from a block that matched in part.
        held_steps: steps the request waited for another one to compute its prefix.
    """

    ranges: tuple[CacheRange, ...]
    copied_tokens: int = 0
    held_steps: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.ranges[-1].end

    @property
    def cached_tokens(self) -> int:
        return sum(r.num_tokens for r in self.ranges if r.reason is None)

    def missed_tokens(self) -> dict[MissReason, int]:
        """Computed prompt tokens by reason."""
        counts: dict[MissReason, int] = {}
        for piece in self.ranges:
            if piece.reason is not None:
                counts[piece.reason] = counts.get(piece.reason, 0) + piece.num_tokens
        return counts

    def with_text(self, token_text: Callable[[int], str]) -> "CacheReport":
        """The same report with the text of the tokens that it names."""

        def add(piece: CacheRange) -> CacheRange:
            texts = {
                f"{side}_text": token_text(piece.detail[f"{side}_token"])
                for side in ("here", "there")
                if f"{side}_token" in piece.detail
            }
            return dataclasses.replace(piece, detail={**piece.detail, **texts}) if texts else piece

        return dataclasses.replace(self, ranges=tuple(add(r) for r in self.ranges))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in requests.jsonl."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "copied_tokens": self.copied_tokens,
            "held_steps": self.held_steps,
            "ranges": [r.to_dict() for r in self.ranges],
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "CacheReport":
        ranges = tuple(CacheRange.from_dict(r) for r in row["ranges"])
        return cls(ranges, row["copied_tokens"], row["held_steps"])

    def describe(self) -> str:
        """One sentence for people."""
        parts = list(self._phrases())
        computed = self.prompt_tokens - self.cached_tokens
        parts.append(f"{computed} token{'s'[: computed != 1]} computed")
        return "; ".join(parts)

    def __str__(self) -> str:
        return self.describe()

    def _phrases(self) -> Iterator[str]:
        if self.held_steps:
            yield f"held for {self.held_steps} step{'s'[: self.held_steps != 1]}"
        for piece in self.ranges:
            if piece.reason is None:
                copied = f" ({self.copied_tokens} of them copied)" if self.copied_tokens else ""
                yield f"{_tokens(piece)} hit{copied}"
            else:
                yield _MISS_PHRASES[piece.reason](piece, piece.detail)


def _tokens(piece: CacheRange) -> str:
    if piece.num_tokens == 1:
        return f"token {piece.start}"
    return f"tokens {piece.start}-{piece.end - 1}"


def _name(detail: Mapping[str, Any], side: str) -> str:
    text = detail.get(f"{side}_text")
    return f"token id {detail[f'{side}_token']}" if text is None else repr(text)


def _diverged(piece: CacheRange, detail: Mapping[str, Any]) -> str:
    here, there = _name(detail, "here"), _name(detail, "there")
    return (
        f"diverged at token {piece.start}: {here} here, {there} in request {detail['request_id']}"
    )


def _evicted(piece: CacheRange, detail: Mapping[str, Any]) -> str:
    return (
        f"{_tokens(piece)} evicted {detail['seconds_ago']:.3g} s ago, in step {detail['step']}, "
        f"for request {detail['request_id']} while requests held {detail['blocks_used']} of "
        f"{detail['blocks_total']} blocks"
    )


_MISS_PHRASES: dict[MissReason, Callable[[CacheRange, Mapping[str, Any]], str]] = {
    MissReason.COLD: lambda piece, detail: f"{_tokens(piece)} cold",
    MissReason.EVICTED: _evicted,
    MissReason.DIVERGED: _diverged,
    MissReason.BELOW_BLOCK: lambda piece, detail: (
        f"{_tokens(piece)} below a block ({detail['common_tokens']} of {detail['block_size']} "
        f"as in request {detail['request_id']})"
    ),
    MissReason.PENDING: lambda piece, detail: (
        f"{_tokens(piece)} being computed by request {detail['request_id']} in the same step"
    ),
    MissReason.LAST_TOKEN: lambda piece, detail: f"{_tokens(piece)} is always computed",
    MissReason.SALT: lambda piece, detail: f"{_tokens(piece)} cached under another salt or adapter",
    MissReason.DISABLED: lambda piece, detail: f"{_tokens(piece)} not looked up: {detail['why']}",
}
