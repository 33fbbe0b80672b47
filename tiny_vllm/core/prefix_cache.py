"""Which published block holds which prefix: hash -> entry, verified on every hit.

A hit counts only when the entry's tokens and its whole ancestry are those of the
request, so a colliding hash costs a miss, never a wrong answer. Publications are
provisional until `commit`: `retract` takes back those whose KV was not computed.
Invariant: a block has an entry exactly when that entry lists the block.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tiny_vllm.core.block_hash import HashChain, HashFn, blake2b_128, pack_tokens
from tiny_vllm.core.block_pool import Block
from tiny_vllm.core.prefix_entry import Parent, PrefixEntry, num_common
from tiny_vllm.request import BlockHash, Request, RequestId

_FEW_ROOTS = 256  # pairs of salt and adapter kept without a look at whether they are in use
_RECENT = 16  # arrivals whose hashes a new prompt with the same beginning takes over


class PartialMatch(NamedTuple):
    """A cached block that begins as the request goes on: what can be copied from it."""

    block: Block
    num_tokens: int


class PrefixCache:
    """Finds and publishes blocks by content: full ones by hash, parts of one by parent.

    Args:
        partial_reuse: also find the block that matches only in part, and keep the half-filled
            last blocks of requests for it.
    """

    enabled = True

    def __init__(
        self, block_size: int, hash_fn: HashFn = blake2b_128, partial_reuse: bool = True
    ) -> None:
        self._block_size = block_size
        self._hash_fn = hash_fn
        self.partial_reuse = partial_reuse
        self._entries: dict[BlockHash, PrefixEntry] = {}
        self._tails: set[PrefixEntry] = set()
        self._roots: dict[bytes, PrefixEntry] = {}
        self._max_roots = _FEW_ROOTS
        self._chains: dict[RequestId, HashChain] = {}
        self._recent: deque[HashChain] = deque(maxlen=_RECENT)  # of the last arrivals
        self._provisional: list[tuple[RequestId, Block, PrefixEntry | None]] = []
        self._uncomputed: set[Block] = set()  # those of `_provisional`

    def __len__(self) -> int:
        return len(self._entries)

    def prepare(self, request: Request) -> None:
        """Hash the full blocks known so far. Raises InvalidRequestError for bad token ids."""
        chain = self._chain(request)
        chain.extend(request, self._recent)
        if chain not in self._recent:
            self._recent.appendleft(chain)

    def num_askable(self, num_tokens: int) -> int:
        """Full blocks a look-up may ask for: at least one token is left to compute."""
        return max(0, num_tokens - 1) // self._block_size

    def match(self, request: Request) -> list[Block]:
        """Blocks that hold the longest cached prefix, at most ``num_askable`` of them."""
        chain = self._chain(request)
        chain.extend(request)
        found: list[Block] = []
        parent = self._roots.get(chain.root)
        limit = self.num_askable(request.num_tokens)
        for block_hash, tokens in zip(request.block_hashes[:limit], chain.tokens, strict=False):
            entry = self._entries.get(block_hash)
            if entry is None or entry.tokens != tokens or entry.parent is not parent:
                break
            found.append(entry.blocks[0])
            parent = entry
        return found

    def match_part(self, request: Request, found: Sequence[Block]) -> PartialMatch | None:
        """The computed block with most tokens in common with what follows the ``found`` blocks.

        At least one token of the request is left to compute.
        """
        if not self.partial_reuse:
            return None
        parent = self.parent_after(request, found)
        wanted = self._next_tokens(request, len(found))
        best: PartialMatch | None = None
        for entry in parent.near(wanted) if parent and wanted else ():
            length = num_common(entry.tokens, wanted)
            if length <= (best.num_tokens if best else 0):
                continue
            block = next((b for b in entry.blocks if b not in self._uncomputed), None)
            if block is not None:
                best = PartialMatch(block, length)
        return best

    def nearest(self, request: Request, found: Sequence[Block]) -> tuple[Parent, int]:
        """The entry that continues the ``found`` blocks most as the request does, and how far.

        Computed or not; in tokens, the last of the request not counted. (None, 0) where
        nothing continues them.
        """
        parent = self.parent_after(request, found)
        if parent is None:
            return None, 0
        wanted = self._next_tokens(request, len(found))
        best: Parent = None
        length = -1
        for entry in parent.near(wanted):
            common = num_common(entry.tokens, wanted)
            if common > length:
                best, length = entry, common
        return best, max(length, 0)

    def num_under_other_roots(self, request: Request, max_roots: int) -> int:
        """Full blocks of the request's beginning that are cached under another salt or adapter."""
        chain = self._chain(request)
        best = 0
        for key in list(self._roots)[-max_roots:]:
            depth, entry = 0, None if key == chain.root else self._roots[key]
            for tokens in chain.tokens:
                entry = entry.find_child(tokens) if entry is not None else None
                if entry is None:
                    break
                depth += 1
            best = max(best, depth)
        return best

    def parent_after(self, request: Request, found: Sequence[Block]) -> Parent:
        """The entry whose children continue the request after the ``found`` blocks."""
        return found[-1].entry if found else self._roots.get(self._chain(request).root)

    def publish(self, request: Request, blocks: Sequence[Block], start: int) -> None:
        """Publish ``blocks``, the request's blocks number ``start - 1`` (none for 0) onwards.

        The first is there for its entry; a block whose parent is not published (a
        colliding hash kept it out) stays private, as do all after it.
        """
        chain = self._chain(request)
        chain.extend(request)
        parent = blocks[0].entry if start else self._root(chain)
        for index, block in enumerate(blocks[1:] if start else blocks, start):
            if parent is None:
                return
            block_hash, tokens = request.block_hashes[index], chain.tokens[index]
            parent = self._add(block_hash, parent, tokens, block, request.request_id)
            self._provisional.append((request.request_id, block, parent))
            self._uncomputed.add(block)

    def publish_tail(
        self, request: Request, before: Block | None, block: Block, end: int, computed: bool
    ) -> list[Block]:
        """Let parts of a half-filled block be found: it holds the tokens up to ``end``.

        Args:
            before: the request's block before, None if there is none.
            computed: False while these tokens are still to run in this step.

        Returns:
            Blocks that lost their entry, because this one holds all that they hold.
        """
        if not self.partial_reuse or (block.entry is not None and not block.entry.is_tail):
            return []
        parent = before.entry if before is not None else self._root(self._chain(request))
        if parent is None:
            return []
        tokens = pack_tokens(request.token_ids[end - end % self._block_size : end])
        covered = []
        for other in parent.near(tokens):
            if other.tokens.startswith(tokens):
                return []  # known already
            if other.is_tail and computed and tokens.startswith(other.tokens):
                covered += other.blocks
        if block.entry is not None:  # its own, shorter
            covered.append(block)
        for old in covered:
            self.forget(old)
        entry = PrefixEntry(None, parent, tokens, request.request_id)
        parent.add_child(entry)
        self._tails.add(entry)
        entry.blocks.append(block)
        block.entry = entry
        if not computed:
            self._provisional.append((request.request_id, block, entry))
            self._uncomputed.add(block)
        return [old for old in covered if old is not block]

    def forget(self, block: Block) -> None:
        """Drop the block's entry (it is about to be handed out, or was never computed)."""
        entry = block.entry
        if entry is None:
            return
        block.entry = None
        entry.blocks.remove(block)
        if not entry.blocks:
            self._drop(entry)

    def forget_request(self, request: Request) -> None:
        """Drop what is kept per request; its published blocks stay."""
        self._chains.pop(request.request_id, None)

    def commit(self) -> None:
        """The KV of everything published so far is computed."""
        self._provisional.clear()
        self._uncomputed.clear()

    def retract(self, request_ids: Collection[RequestId]) -> list[Block]:
        """Unpublish what these requests published since `commit`, and what builds on it."""
        entries: set[Parent | None] = set()
        retracted = []
        for request_id, block, entry in self._provisional:
            if entry is None or block.entry is not entry:  # handed out again since
                continue
            if request_id in request_ids or entry.parent in entries:
                entries.add(entry)
                retracted.append(block)
        for block in retracted:
            self.forget(block)
        return retracted

    def clear(self) -> None:
        """Forget every prefix."""
        for entry in (*self._entries.values(), *self._tails):
            for block in entry.blocks:
                block.entry = None
        self._entries.clear()
        self._tails.clear()
        self._roots.clear()
        self.commit()

    def check(self, blocks: Sequence[Block]) -> None:
        """Raise AssertionError unless entries and blocks point at each other."""
        for block in blocks:
            entry = block.entry
            if entry is not None:
                assert block in entry.blocks, f"block {block.block_id} is not in its entry"
                known = self._entries.get(entry.block_hash) if entry.block_hash else entry
                assert known is entry, f"the entry of block {block.block_id} is not reachable"
                assert not entry.is_tail or entry in self._tails, "a tail is not listed"
                assert entry.parent is not None, f"block {block.block_id} hangs in the air"
                assert entry.parent.find_child(entry.tokens) is entry, "the prefix tree is torn"
        entries = (*self._entries.values(), *self._tails)
        count = sum(len(entry.blocks) for entry in entries)
        assert count == sum(b.entry is not None for b in blocks), "entries list lost blocks"

    def _chain(self, request: Request) -> HashChain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = HashChain(request, self._block_size, self._hash_fn)
            self._chains[request.request_id] = chain
        return chain

    def _root(self, chain: HashChain) -> PrefixEntry:
        root = self._roots.get(chain.root)
        if root is None:
            if len(self._roots) >= self._max_roots:  # salts may be many and used once
                self._roots = {key: kept for key, kept in self._roots.items() if kept.children}
                self._max_roots = 2 * len(self._roots) + _FEW_ROOTS
            root = self._roots[chain.root] = PrefixEntry(None, None, b"")
        return root

    def _next_tokens(self, request: Request, num_blocks: int) -> bytes:
        """The block after the first ``num_blocks``, packed, without the request's last token."""
        size = self._block_size
        start = num_blocks * size
        return pack_tokens(request.token_ids[start : min(start + size, request.num_tokens - 1)])

    def _add(
        self,
        block_hash: BlockHash,
        parent: PrefixEntry,
        tokens: bytes,
        block: Block,
        publisher: RequestId,
    ) -> PrefixEntry | None:
        if block.entry is not None:  # it was a tail and is full now
            self.forget(block)
        entry = self._entries.get(block_hash)
        if entry is None:
            entry = PrefixEntry(block_hash, parent, tokens, publisher)
            self._entries[block_hash] = entry
            parent.add_child(entry)
        elif entry.tokens != tokens or entry.parent is not parent:
            return None
        entry.blocks.append(block)
        block.entry = entry
        return entry

    def _drop(self, entry: PrefixEntry) -> None:
        """Take an entry without blocks out of the tree."""
        if entry.block_hash is None:
            self._tails.discard(entry)
        else:
            del self._entries[entry.block_hash]
        if entry.parent is not None:
            entry.parent.remove_child(entry)


class NoPrefixCache(PrefixCache):
    """Prefix caching switched off: the same interface, nothing is hashed, kept or found."""

    enabled = False

    def prepare(self, request: Request) -> None:
        pass

    def num_askable(self, num_tokens: int) -> int:
        return 0

    def match(self, request: Request) -> list[Block]:
        return []

    def match_part(self, request: Request, found: Sequence[Block]) -> PartialMatch | None:
        return None

    def nearest(self, request: Request, found: Sequence[Block]) -> tuple[Parent, int]:
        return None, 0

    def publish(self, request: Request, blocks: Sequence[Block], start: int) -> None:
        pass

    def publish_tail(
        self, request: Request, before: Block | None, block: Block, end: int, computed: bool
    ) -> list[Block]:
        return []
