"""The pool of KV-cache blocks: reference counts and one free list, O(1) per block.

A block is *free* (no references, nothing worth keeping), *cached* (no references, but
its prefix entry can still be hit) or *referenced*; free + cached + referenced = total.
Eviction is lazy: a released block keeps its entry until it is handed out. What an entry
means is the prefix cache's business.

    free list   [ free blocks | cached: oldest tail ... | newest head ]  handed out from the left
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

from tiny_vllm.core.prefix_entry import PrefixEntry
from tiny_vllm.request import BlockId

_by_id = attrgetter("block_id")


class Block:
    """One physical block; ``prev`` and ``next`` link it into the free list."""

    __slots__ = ("block_id", "entry", "next", "prev", "ref_count")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.entry: PrefixEntry | None = None
        self.prev = self
        self.next = self


class BlockPool:
    """Hands out and takes back blocks.

    Args:
        num_blocks: number of physical blocks.
        on_evict: called with a cached block about to be handed out; must clear its entry.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[Block], None]) -> None:
        self.blocks = [Block(BlockId(i)) for i in range(num_blocks)]
        self._on_evict = on_evict
        self._end = Block(BlockId(-1))  # sentinel of the circular list
        self.num_available = 0
        self.restore_order()

    def restore_order(self) -> None:
        """Put all blocks on the free list in ascending order; none may be referenced."""
        self._end.prev = self._end.next = self._end
        self.num_available = 0
        self._next_run = 0  # where the next new run of blocks is tried
        for block in self.blocks:
            assert block.ref_count == 0, f"block {block.block_id} is referenced"
            self._insert_before(block, self._end)

    @property
    def num_referenced(self) -> int:
        return len(self.blocks) - self.num_available

    def allocate(self, num_blocks: int) -> list[Block]:
        """Hand out blocks in ascending id order, evicting cached ones as needed.

        The order makes a run freed tail first contiguous again. The caller checks
        ``num_available`` beforehand.
        """
        assert num_blocks <= self.num_available, f"{num_blocks} > {self.num_available} blocks"
        taken, block = [], self._end.next
        for _ in range(num_blocks):
            if block.entry is not None:
                self._on_evict(block)
            block.ref_count = 1
            taken.append(block)
            block = block.next
        self._end.next, block.prev = block, self._end
        self.num_available -= num_blocks
        taken.sort(key=_by_id)
        return taken

    def allocate_run(
        self, num_blocks: int, after: BlockId | None, headroom: int
    ) -> list[Block] | None:
        """Hand out consecutive free blocks: behind ``after``, else at the start of a new run.

        A new run leaves ``headroom`` free blocks behind it, so that requests that grow
        side by side stay consecutive: the data plane reads a run without a gather. The
        headroom is a hope, not a reservation. Cached blocks are never taken here.

        Returns:
            None (and no change) when a short search finds no such place.
        """
        if after is not None and self._is_free(after + 1, num_blocks):
            return self._take(after + 1, num_blocks)
        width = num_blocks + headroom
        for start in (self._next_run, 0):
            if self._is_free(start, width):
                self._next_run = start + width
                return self._take(start, num_blocks)
        return None

    def acquire(self, block: Block) -> None:
        """Add a reference; a cached block leaves the middle of the free list."""
        self.acquire_all((block,))

    def acquire_all(self, blocks: Sequence[Block]) -> None:
        """`acquire` for many: a hit on a long prefix has hundreds."""
        for block in blocks:
            if block.ref_count == 0:
                self._unlink(block)
            block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Drop one reference of each, last first, so that tails are evicted before heads."""
        for block in reversed(blocks):
            block.ref_count -= 1
            assert block.ref_count >= 0, f"block {block.block_id} released too often"
            if block.ref_count == 0:
                self._insert_before(block, self._end if block.entry else self._end.next)

    def touch(self, block: Block) -> None:
        """Make an unreferenced block the newest: its content was read."""
        if block.ref_count == 0:
            self._unlink(block)
            self._insert_before(block, self._end)

    def demote(self, block: Block) -> None:
        """Move an unreferenced block that lost its entry to where it is handed out first."""
        if block.ref_count == 0:
            self._unlink(block)
            self._insert_before(block, self._end.next)

    def check(self) -> None:
        """Raise AssertionError unless free + cached + referenced = total."""
        listed = []
        block = self._end.next
        while block is not self._end:
            assert block.next.prev is block, f"free list is torn at block {block.block_id}"
            assert block.ref_count == 0, f"block {block.block_id} is listed and referenced"
            listed.append(block.block_id)
            block = block.next
        cached = sum(self.blocks[i].entry is not None for i in listed)
        free = len(listed) - cached
        referenced = sum(b.ref_count > 0 for b in self.blocks)
        total = len(self.blocks)
        assert len(set(listed)) == len(listed) == self.num_available, "free list is torn"
        assert free + cached + referenced == total, f"{free} + {cached} + {referenced} != {total}"

    def _is_free(self, start: int, num_blocks: int) -> bool:
        end = start + num_blocks
        return end <= len(self.blocks) and all(
            block.ref_count == 0 and block.entry is None for block in self.blocks[start:end]
        )

    def _take(self, start: int, num_blocks: int) -> list[Block]:
        taken = self.blocks[start : start + num_blocks]
        for block in taken:
            self.acquire(block)
        return taken

    def _unlink(self, block: Block) -> None:
        block.prev.next = block.next
        block.next.prev = block.prev
        self.num_available -= 1

    def _insert_before(self, block: Block, place: Block) -> None:
        block.prev = place.prev
        block.next = place
        place.prev.next = block
        place.prev = block
        self.num_available += 1
