"""A bounded memory of what was evicted: when, for whom and under what pressure."""

from typing import NamedTuple

from tiny_vllm.request import BlockHash, RequestId


class Eviction(NamedTuple):
    """A block was taken from the cache because ``request_id`` needed one.

    Attributes:
        time: perf_counter seconds.
        blocks_used: blocks that requests held then, of ``blocks_total``.
    """

    step: int
    time: float
    request_id: RequestId
    blocks_used: int
    blocks_total: int


class EvictedBlocks:
    """The evictions of the newest ``limit`` hashes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._evictions: dict[BlockHash, Eviction] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._evictions)

    def add(self, block_hash: BlockHash, eviction: Eviction) -> None:
        """Remember an eviction; the oldest is forgotten where there are too many."""
        self._evictions.pop(block_hash, None)
        if len(self._evictions) >= self._limit:
            del self._evictions[next(iter(self._evictions))]
        self._evictions[block_hash] = eviction

    def get(self, block_hash: BlockHash) -> Eviction | None:
        """The last eviction of this content, if it is remembered."""
        return self._evictions.get(block_hash)

    def clear(self) -> None:
        self._evictions.clear()
