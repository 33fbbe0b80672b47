"""Which published block holds which prefix: hash -> entry, verified on every hit.

A hit counts only when the entry's tokens and its whole ancestry are those of the
request, so a colliding hash costs a miss, never a wrong answer. Publications are
provisional until `commit`: `retract` takes back those whose KV was not computed.
Invariant: a block has an entry exactly when that entry lists the block.
"""

from collections import deque
from collections.abc import Collection, Sequence

from tiny_vllm.core.block_hash import HashChain, HashFn, blake2b_128
from tiny_vllm.core.block_pool import Block, Parent, PrefixEntry
from tiny_vllm.request import BlockHash, Request, RequestId

_RECENT = 16  # arrivals whose hashes a new prompt with the same beginning takes over


class PrefixCache:
    """Finds and publishes full blocks by content."""

    def __init__(self, block_size: int, hash_fn: HashFn = blake2b_128) -> None:
        self._block_size = block_size
        self._hash_fn = hash_fn
        self._entries: dict[BlockHash, PrefixEntry] = {}
        self._chains: dict[RequestId, HashChain] = {}
        self._recent: deque[HashChain] = deque(maxlen=_RECENT)  # of the last arrivals
        self._provisional: list[tuple[RequestId, Block, PrefixEntry | None]] = []

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
        parent: Parent = chain.root
        limit = self.num_askable(request.num_tokens)
        for block_hash, tokens in zip(request.block_hashes[:limit], chain.tokens, strict=False):
            entry = self._entries.get(block_hash)
            if entry is None or entry.tokens != tokens or entry.parent != parent:
                break
            found.append(entry.blocks[0])
            parent = entry
        return found

    def publish(self, request: Request, blocks: Sequence[Block], start: int) -> None:
        """Publish ``blocks``, the request's blocks number ``start - 1`` (none for 0) onwards.

        The first is there for its entry; a block whose parent is not published (a
        colliding hash kept it out) stays private, as do all after it.
        """
        chain = self._chain(request)
        chain.extend(request)
        parent = blocks[0].entry if start else chain.root
        for index, block in enumerate(blocks[1:] if start else blocks, start):
            if parent is None:
                return
            parent = self._add(request.block_hashes[index], parent, chain.tokens[index], block)
            self._provisional.append((request.request_id, block, parent))

    def forget(self, block: Block) -> None:
        """Drop the block's entry (it is about to be handed out, or was never computed)."""
        entry = block.entry
        if entry is None:
            return
        block.entry = None
        entry.blocks.remove(block)
        if not entry.blocks:
            del self._entries[entry.block_hash]

    def forget_request(self, request: Request) -> None:
        """Drop what is kept per request; its published blocks stay."""
        self._chains.pop(request.request_id, None)

    def commit(self) -> None:
        """The KV of everything published so far is computed."""
        self._provisional.clear()

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
        for entry in self._entries.values():
            for block in entry.blocks:
                block.entry = None
        self._entries.clear()
        self._provisional.clear()

    def check(self, blocks: Sequence[Block]) -> None:
        """Raise AssertionError unless entries and blocks point at each other."""
        for block in blocks:
            entry = block.entry
            if entry is not None:
                assert block in entry.blocks, f"block {block.block_id} is not in its entry"
                assert self._entries.get(entry.block_hash) is entry, "entry is not reachable"
        listed = sum(len(entry.blocks) for entry in self._entries.values())
        assert listed == sum(b.entry is not None for b in blocks), "entries list lost blocks"

    def _chain(self, request: Request) -> HashChain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = HashChain(request, self._block_size, self._hash_fn)
            self._chains[request.request_id] = chain
        return chain

    def _add(
        self, block_hash: BlockHash, parent: Parent, tokens: bytes, block: Block
    ) -> PrefixEntry | None:
        entry = self._entries.get(block_hash)
        if entry is None:
            entry = self._entries[block_hash] = PrefixEntry(block_hash, parent, tokens)
        elif entry.tokens != tokens or entry.parent != parent:
            return None
        entry.blocks.append(block)
        block.entry = entry
        return entry


class NoPrefixCache(PrefixCache):
    """Prefix caching switched off: the same interface, nothing is hashed, kept or found."""

    def prepare(self, request: Request) -> None:
        pass

    def num_askable(self, num_tokens: int) -> int:
        return 0

    def match(self, request: Request) -> list[Block]:
        return []

    def publish(self, request: Request, blocks: Sequence[Block], start: int) -> None:
        pass
