"""Block tables of requests: look-up, allocation, publication and release.

Blocks are published when their tokens are *scheduled*, so a request admitted later in
the same step shares them (KV is written before attention in every layer). `commit` ends
a step; `retract` takes publications back. A half-filled block is never shared, only
copied from, and a shared block is never written.
"""

import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tiny_vllm.core.block_hash import HashFn, blake2b_128
from tiny_vllm.core.block_pool import Block, BlockPool
from tiny_vllm.core.evicted_blocks import EvictedBlocks, Eviction
from tiny_vllm.core.pins import Pin, Pins
from tiny_vllm.core.prefix_cache import NoPrefixCache, PartialMatch, PrefixCache
from tiny_vllm.outputs import FinishReason
from tiny_vllm.protocol import BlockCopy
from tiny_vllm.request import BlockId, Request, RequestId

_FEW_EVICTIONS = 4096  # are remembered whatever the size of the pool
_MAX_HEADROOM = 64  # blocks; an output limit is often far above what is generated


class PrefixHit(NamedTuple):
    """What a look-up found.

    Attributes:
        blocks: full blocks, to be shared.
        num_tokens: tokens found in all, those to be copied included.
        num_asked: full blocks asked for.
        part: the block whose first tokens are to be copied; they follow ``blocks``.
    """

    blocks: tuple[Block, ...] = ()
    num_tokens: int = 0
    num_asked: int = 0
    part: PartialMatch | None = None

    @property
    def num_copied_tokens(self) -> int:
        return self.part.num_tokens if self.part is not None else 0


NO_HIT = PrefixHit()


class KVCacheManager:
    """Owns the pool, the prefix cache and the memory of what was evicted.

    Attributes:
        step: number of the current step, for that memory; the scheduler sets it.

    Args:
        num_blocks, block_size: shape of the pool; a block holds ``block_size`` tokens.
        enable_prefix_caching: False puts the null cache in place.
        hash_fn: bytes -> digest of the hash chain.
        partial_reuse: also reuse the beginning of a block that matches in part.
        max_pinned_share: share of the blocks that pins may hold.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_fn: HashFn = blake2b_128,
        partial_reuse: bool = True,
        max_pinned_share: float = 0.5,
    ) -> None:
        self.block_size = block_size
        kind = PrefixCache if enable_prefix_caching else NoPrefixCache
        self.cache = kind(block_size, hash_fn, partial_reuse)
        self.pool = BlockPool(num_blocks, self._evict)
        self.pins = Pins(self.pool, int(num_blocks * max_pinned_share))
        self.evictions = EvictedBlocks(max(_FEW_EVICTIONS, 2 * num_blocks))
        self.step = 0
        self._needed_by: RequestId | None = None  # whom blocks are taken for
        self._eviction: Eviction | None = None  # of this allocation

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out: free and cached ones."""
        return self.pool.num_available

    @property
    def capacity(self) -> int:
        """Tokens the whole pool holds."""
        return len(self.pool.blocks) * self.block_size

    def prepare(self, request: Request) -> None:
        """Hash the prompt. Raises InvalidRequestError for token ids that are no uint32."""
        self.cache.prepare(request)

    def lookup(self, request: Request) -> PrefixHit:
        """Longest cached prefix; changes nothing. Always leaves >= 1 token to compute."""
        if not request.use_prefix_cache:
            return NO_HIT
        blocks = tuple(self.cache.match(request))
        asked = self.cache.num_askable(request.num_tokens)
        part = self.cache.match_part(request, blocks)
        num_tokens = len(blocks) * self.block_size + (part.num_tokens if part else 0)
        return PrefixHit(blocks, num_tokens, asked, part)

    def fits(self, request: Request, hit: PrefixHit, reserve: int) -> bool:
        """Whether all known tokens fit with ``reserve`` blocks left over, given the hit."""
        unreferenced = [block.ref_count for block in hit.blocks].count(0)
        new = -(-request.num_tokens // self.block_size) - len(hit.blocks)
        return new + unreferenced + reserve <= self.pool.num_available

    def room(self, request: Request) -> int:
        """Tokens the request could run now: the rest of its table and all available blocks."""
        blocks = len(request.block_ids) + self.pool.num_available
        return blocks * self.block_size - request.num_computed_tokens

    def allocate(
        self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT
    ) -> list[BlockId] | None:
        """Give the request blocks for its next tokens and publish those they fill.

        With ``hit`` (for a request without blocks) the found blocks start the table
        and count as computed, as do the tokens to be copied into the next block: the
        caller sees to the copy (`copy_of`).

        Returns:
            The ids appended to ``request.block_ids``, or None (and no change) if the pool
            has too few.
        """
        end = request.num_computed_tokens + num_new_tokens
        if end <= len(request.block_ids) * self.block_size:  # nearly every decode
            self._publish(request, end)
            return []
        return self._allocate(request, num_new_tokens, hit)

    def reserve_next(self, request: Request, spare: int) -> list[BlockId]:
        """Give a decode the block of the token after its next one, if that starts a block.

        So the data plane can run a step ahead. Best effort: nothing when the request ends
        before that token, or when ``spare`` blocks or fewer would be left.
        """
        position = request.num_computed_tokens + 1
        table = request.block_ids
        if position < len(table) * self.block_size or self.pool.num_available <= spare:
            return []
        if position >= request.num_prompt_tokens + request.max_tokens - 1:
            return []
        new = [block.block_id for block in self._new_blocks(request, 1)]
        table.extend(new)
        return new

    def tokens_lost(self, request: Request) -> int:
        """Computed tokens that only this request holds: the work a preemption puts at risk."""
        blocks, table = self.pool.blocks, request.block_ids
        low, high = 0, len(table)
        while low < high:  # blocks shared with others are a prefix of the table
            middle = (low + high) // 2
            if blocks[table[middle]].ref_count > 1:
                low = middle + 1
            else:
                high = middle
        return max(0, request.num_computed_tokens - low * self.block_size)

    def pin(self, request: Request, ttl: float | None) -> Pin:
        """Keep the cached full blocks of a prompt from eviction; see `Pins.add`.

        Args:
            request: stands for the prompt alone, with its salt and adapter.
        """
        self.prepare(request)
        request.token_ids.append(0)  # all blocks of the prompt may be found
        blocks = self.cache.match(request)
        self.cache.forget_request(request)
        return self.pins.add(blocks, len(blocks) * self.block_size, ttl)

    def copy_of(self, request: Request, hit: PrefixHit) -> BlockCopy | None:
        """The copy that an admission with ``hit`` asks for, once its blocks are allocated."""
        if hit.part is None:
            return None
        target = request.block_ids[len(hit.blocks)]
        return BlockCopy(hit.part.block.block_id, target, hit.part.num_tokens)

    def release(self, request: Request) -> None:
        """Give back the table (preemption); what was computed stays cached, hashes are kept."""
        if request.finish_reason is not FinishReason.ERROR:
            self._publish_tail(request, request.num_computed_tokens, computed=True)
        self.pool.release(self._blocks(request.block_ids))
        request.block_ids = []

    def free(self, request: Request) -> None:
        """Give back the table and everything kept for the request."""
        self.release(request)
        self.cache.forget_request(request)

    def commit(self) -> None:
        """The scheduled tokens were computed; their published blocks are now firm."""
        self.cache.commit()

    def retract(self, request_ids: Collection[RequestId]) -> set[BlockId]:
        """Unpublish what these requests published in this step, and all that builds on it.

        Returns:
            The blocks without valid KV; a request whose table holds one must recompute.
        """
        blocks = self.cache.retract(request_ids)
        for block in blocks:
            self.pool.demote(block)
        return {block.block_id for block in blocks}

    def reset(self) -> bool:
        """Forget all prefixes and pins; False (and no change) while requests hold blocks."""
        pins = self.pins
        if any(block.ref_count > pins.count(block.block_id) for block in self.pool.blocks):
            return False
        pins.clear()
        self.cache.clear()
        self.evictions.clear()
        self.pool.restore_order()
        return True

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless pool, cache and the tables of ``requests`` agree."""
        self.pool.check()
        self.cache.check(self.pool.blocks)
        counts = [0] * len(self.pool.blocks)
        for request in requests:
            assert len(request.block_ids) * self.block_size >= request.num_computed_tokens, request
            for block_id in request.block_ids:
                counts[block_id] += 1
        for block, held in zip(self.pool.blocks, counts, strict=True):
            count = held + self.pins.count(block.block_id)
            assert block.ref_count == count, f"block {block.block_id}: {block.ref_count} != {count}"

    def _allocate(self, request: Request, num_new: int, hit: PrefixHit) -> list[BlockId] | None:
        end = request.num_computed_tokens + hit.num_tokens + num_new
        table = request.block_ids
        need = -(-end // self.block_size) - len(table) - len(hit.blocks)
        unreferenced = [block.ref_count for block in hit.blocks].count(0)
        if max(0, need) + unreferenced > self.pool.num_available:
            return None
        self._take_hit(request, hit)
        new = [block.block_id for block in self._new_blocks(request, max(0, need))]
        table.extend(new)
        self._publish(request, end)
        return [block.block_id for block in hit.blocks] + new

    def _new_blocks(self, request: Request, num_blocks: int) -> list[Block]:
        """Blocks for the end of a table: consecutive ones where the pool has them."""
        if num_blocks == 0:
            return []
        self._needed_by, self._eviction = request.request_id, None
        last = request.block_ids[-1] if request.block_ids else None
        final = -(-(request.num_prompt_tokens + request.max_tokens) // self.block_size)
        headroom = min(_MAX_HEADROOM, max(0, final - len(request.block_ids) - num_blocks))
        run = self.pool.allocate_run(num_blocks, last, headroom)
        return self.pool.allocate(num_blocks) if run is None else run

    def _evict(self, block: Block) -> None:
        """A cached block is about to be handed out."""
        entry = block.entry
        if entry is not None and entry.block_hash is not None and len(entry.blocks) == 1:
            self.evictions.add(entry.block_hash, self._eviction or self._new_eviction())
        self.cache.forget(block)

    def _new_eviction(self) -> Eviction:
        assert self._needed_by is not None, "an eviction outside an allocation"
        pool = self.pool
        self._eviction = Eviction(
            self.step, time.perf_counter(), self._needed_by, pool.num_referenced, len(pool.blocks)
        )
        return self._eviction

    def _take_hit(self, request: Request, hit: PrefixHit) -> None:
        if not hit.num_tokens:
            return
        assert not request.block_ids, f"{request.request_id} already holds blocks"
        self.pool.acquire_all(hit.blocks)
        if hit.part is not None:
            self.pool.touch(hit.part.block)
        request.block_ids.extend([block.block_id for block in hit.blocks])
        request.num_computed_tokens = hit.num_tokens

    def _publish(self, request: Request, end: int) -> None:
        start = request.num_computed_tokens
        first, last = start // self.block_size, end // self.block_size
        if first < last:
            blocks = self._blocks(request.block_ids[max(0, first - 1) : last])
            self.cache.publish(request, blocks, first)
        if start < request.num_prompt_tokens <= end:
            self._publish_tail(request, end, computed=False)

    def _publish_tail(self, request: Request, end: int, computed: bool) -> None:
        """Let the half-filled block that ends at token ``end`` be found in part."""
        index, num_tokens = divmod(end, self.block_size)
        if num_tokens == 0 or index >= len(request.block_ids):
            return
        before = self.pool.blocks[request.block_ids[index - 1]] if index else None
        block = self.pool.blocks[request.block_ids[index]]
        for covered in self.cache.publish_tail(request, before, block, end, computed):
            self.pool.demote(covered)

    def _blocks(self, block_ids: list[BlockId]) -> list[Block]:
        blocks = self.pool.blocks
        return [blocks[block_id] for block_id in block_ids]
