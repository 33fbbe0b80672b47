"""Why a look-up found what it found: the report of a request's admission.

Reads the prefix tree and the memory of evictions, and changes neither; to be asked
before the request itself publishes anything.

    prompt   [ hit ........ | in part (pending, below a block) | the first miss ..... | rest ]
"""

import time
from collections.abc import Iterator

from tiny_vllm.cache_report import CacheRange, CacheReport, MissReason
from tiny_vllm.core.kv_cache_manager import KVCacheManager, PrefixHit
from tiny_vllm.core.prefix_entry import TOKEN_BYTES, PrefixEntry
from tiny_vllm.request import Request

_MAX_ROOTS = 64  # other salts that are searched for the same tokens


def explain(kv: KVCacheManager, request: Request, hit: PrefixHit) -> CacheReport:
    """The report of an admission with ``hit``."""
    why_not = _why_not_asked(kv, request)
    num_prompt = request.num_prompt_tokens
    if why_not is not None:
        ranges = [CacheRange(0, num_prompt, MissReason.DISABLED, {"why": why_not})]
    else:
        ranges = list(_Explanation(kv, request, hit).ranges())
    return CacheReport(tuple(ranges), hit.num_copied_tokens, request.num_held_steps)


def _why_not_asked(kv: KVCacheManager, request: Request) -> str | None:
    if not kv.cache.enabled:
        return "enable_prefix_caching=False"
    if not request.use_prefix_cache:
        return "the request bypasses the cache (prompt log-probabilities do)"
    return None


class _Explanation:
    """One look-up, piece by piece."""

    def __init__(self, kv: KVCacheManager, request: Request, hit: PrefixHit) -> None:
        self._kv, self._request = kv, request
        self._found, self._num_blocks = hit.num_tokens, len(hit.blocks)
        self._last = request.num_prompt_tokens - 1
        parent = kv.cache.parent_after(request, hit.blocks)
        self._parent = parent
        self._near, self._common = kv.cache.nearest(request, hit.blocks)

    def ranges(self) -> Iterator[CacheRange]:
        """Cover the prompt."""
        if self._found:
            yield CacheRange(0, self._found)
        end = self._found
        for piece in self._misses():
            yield piece
            end = piece.end
        if end <= self._last:
            yield CacheRange(end, self._last + 1, MissReason.LAST_TOKEN)

    def _misses(self) -> Iterator[CacheRange]:
        """What lies between the hit and the last token, which may be a part of it."""
        start = self._found
        if start == self._last:
            return
        evicted = self._evicted(start)
        if evicted is not None:
            yield evicted
            start = evicted.end
            if start < self._last:
                yield CacheRange(start, self._last + 1, MissReason.COLD)
            return
        if self._parent is not None and self._near is not None:
            common_end = self._num_blocks * self._kv.block_size + self._common
            if common_end > start:
                yield self._in_part(start, common_end, self._near)
            if common_end < self._last and (self._common or self._num_blocks):
                yield self._diverged(common_end, self._near)
            if self._common or self._num_blocks:
                return
        salted = self._under_other_salts() if not self._num_blocks else 0
        if salted:
            yield CacheRange(0, salted, MissReason.SALT)
        if salted < self._last:
            yield CacheRange(max(salted, start), self._last + 1, MissReason.COLD)

    def _evicted(self, start: int) -> CacheRange | None:
        """The blocks after the hit that were cached once, as many as are remembered."""
        evictions = self._kv.evictions
        first = None
        count = 0
        for block_hash in self._request.block_hashes[self._num_blocks :]:
            eviction = evictions.get(block_hash)
            if eviction is None:
                break
            first = first or eviction
            count += 1
        end = min((self._num_blocks + count) * self._kv.block_size, self._last + 1)
        if first is None or end <= start:
            return None
        detail = {"seconds_ago": round(time.perf_counter() - first.time, 6), **first._asdict()}
        del detail["time"]
        return CacheRange(start, end, MissReason.EVICTED, detail)

    def _in_part(self, start: int, end: int, near: PrefixEntry) -> CacheRange:
        """Tokens that are in a cached block, but could not be taken from there."""
        if self._kv.cache.partial_reuse:
            return CacheRange(start, end, MissReason.PENDING, {"request_id": near.publisher})
        detail = {
            "common_tokens": end - start,
            "block_size": self._kv.block_size,
            "request_id": near.publisher,
        }
        return CacheRange(start, end, MissReason.BELOW_BLOCK, detail)

    def _diverged(self, start: int, near: PrefixEntry) -> CacheRange:
        at = self._common * TOKEN_BYTES
        there = near.tokens[at : at + TOKEN_BYTES]
        if not there:  # a half-filled block that ends here: nobody went on
            return CacheRange(start, self._last + 1, MissReason.COLD)
        detail = {
            "here_token": self._request.token_ids[start],
            "there_token": int.from_bytes(there, "little"),
            "request_id": near.publisher,
        }
        return CacheRange(start, self._last + 1, MissReason.DIVERGED, detail)

    def _under_other_salts(self) -> int:
        """Prompt tokens, in whole blocks, that are cached under another salt or adapter."""
        blocks = self._kv.cache.num_under_other_roots(self._request, _MAX_ROOTS)
        return min(blocks * self._kv.block_size, self._last)
