"""One node of the prefix tree: a block's content, and the blocks that hold it.

Children are kept in the order of their tokens, so that the one with the longest
beginning in common with a prompt is a neighbour of where the prompt would stand.
Invariant: no two children of an entry have the same tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Union

from tiny_vllm.request import BlockHash, RequestId

if TYPE_CHECKING:
    from tiny_vllm.core.block_pool import Block

TOKEN_BYTES = 4  # a packed token, uint32
_MAX_NEIGHBOURS = 8  # looked at on either side
Parent = Union["PrefixEntry", None]
_tokens = attrgetter("tokens")


class PrefixEntry:
    """What a block holds, as the prefix cache knows it.

    ``parent`` is the entry of the block before; a root, which stands for salt and adapter
    and holds nothing, has none. It outlives its children, because who holds a child holds
    the parent and lets go of it later. A *tail* holds fewer tokens than a block and has no
    hash: only a part of a block can be found in it.
    """

    __slots__ = ("block_hash", "blocks", "children", "parent", "publisher", "tokens")

    def __init__(
        self,
        block_hash: BlockHash | None,
        parent: Parent,
        tokens: bytes,
        publisher: RequestId | None = None,
    ) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.tokens = tokens  # uint32, little-endian
        self.publisher = publisher  # the request that published it first
        self.blocks: list[Block] = []
        self.children: list[PrefixEntry] = []

    @property
    def is_tail(self) -> bool:
        return self.block_hash is None

    def add_child(self, child: "PrefixEntry") -> None:
        """Insert at its place; a child with the same tokens must not be there."""
        insort(self.children, child, key=_tokens)

    def remove_child(self, child: "PrefixEntry") -> None:
        """Take a child out."""
        index = bisect_left(self.children, child.tokens, key=_tokens)
        assert self.children[index] is child, "the prefix tree is torn"
        del self.children[index]

    def find_child(self, tokens: bytes) -> Parent:
        """The child with exactly these tokens."""
        index = bisect_left(self.children, tokens, key=_tokens)
        found = self.children[index : index + 1]
        return found[0] if found and found[0].tokens == tokens else None

    def near(self, tokens: bytes) -> Iterator["PrefixEntry"]:
        """Children around where ``tokens`` would stand, on each side the best first.

        The further from there, the shorter the beginning they have in common.
        """
        index = bisect_left(self.children, tokens, key=_tokens)
        yield from self.children[index : index + _MAX_NEIGHBOURS]
        yield from reversed(self.children[max(0, index - _MAX_NEIGHBOURS) : index])


def num_common(a: bytes, b: bytes) -> int:
    """Tokens that two packed sequences have in common at their beginnings."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    if a[: high * TOKEN_BYTES] == b[: high * TOKEN_BYTES]:
        return high
    while high - low > 1:  # equal up to low, not up to high
        middle = (low + high) // 2
        at, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if a[at:end] == b[at:end]:
            low = middle
        else:
            high = middle
    return low
