"""Prefixes kept in the cache on request, within a bound, for a time.

A pin holds a reference on each of its blocks, as a request would. Invariant: the blocks
of all pins together are at most `max_blocks`.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from tiny_vllm.core.block_pool import Block, BlockPool
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.request import BlockId


class Pin(NamedTuple):
    """A pinned prefix; ``expires`` in perf_counter seconds, infinite without a TTL."""

    pin_id: int
    num_tokens: int
    blocks: tuple[Block, ...]
    expires: float


class Pins:
    """All pins, the oldest first.

    Args:
        max_blocks: bound of the blocks that all pins hold together.
    """

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool, self.max_blocks = pool, max_blocks
        self._pins: dict[int, Pin] = {}
        self._counts: Counter[BlockId] = Counter()
        self._ids = count(1)
        self._next_expiry = math.inf

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Blocks that pins hold; a block of two pins counts once."""
        return len(self._counts)

    def count(self, block_id: BlockId) -> int:
        """References that pins hold on a block."""
        return self._counts[block_id]

    def add(self, blocks: Sequence[Block], num_tokens: int, ttl: float | None) -> Pin:
        """Pin blocks for ``ttl`` seconds, None for ever.

        Raises:
            InvalidRequestError: the bound would be passed; nothing is pinned then.
        """
        self.expire()
        new = sum(block.block_id not in self._counts for block in blocks)
        if self.num_blocks + new > self.max_blocks:
            raise InvalidRequestError(
                f"this prefix needs {new} more pinned blocks, and {self.num_blocks} of at most "
                f"{self.max_blocks} are pinned; unpin another one, give a shorter prefix, or raise "
                "max_pinned_share or the size of the cache",
                "prompt",
            )
        expires = math.inf if ttl is None else time.perf_counter() + ttl
        pin = Pin(next(self._ids), num_tokens, tuple(blocks), expires)
        self._pool.acquire_all(pin.blocks)
        self._counts.update(block.block_id for block in blocks)
        self._pins[pin.pin_id] = pin
        self._next_expiry = min(self._next_expiry, expires)
        return pin

    def remove(self, pin_id: int) -> bool:
        """Let go of a pin; False when there is none of this id (any more)."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        self._counts -= Counter(block.block_id for block in pin.blocks)  # drops what gets to 0
        self._pool.release(pin.blocks)
        return True

    def drop_oldest(self) -> bool:
        """Let go of the oldest pin; False when there is none."""
        return self.remove(next(iter(self._pins))) if self._pins else False

    def expire(self) -> None:
        """Let go of the pins whose time is over."""
        if not self._pins or time.perf_counter() < self._next_expiry:
            return
        now = time.perf_counter()
        for pin in list(self._pins.values()):
            if pin.expires <= now:
                self.remove(pin.pin_id)
        self._next_expiry = min((p.expires for p in self._pins.values()), default=math.inf)

    def clear(self) -> None:
        """Let go of all pins."""
        while self.drop_oldest():
            pass
