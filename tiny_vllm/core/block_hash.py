"""The hash chain of a request's full blocks: H(parent, tokens), rooted in salt and adapter.

Owns the binary encoding, which is stable across processes and machines. Each block is
hashed once per request; the chain is extended as tokens arrive. Whether equal hashes
mean equal blocks is checked by the prefix cache, not trusted here.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.request import BlockHash, Request

HashFn = Callable[[bytes], bytes]
MAX_TOKEN_ID = 2**32 - 1


def blake2b_128(data: bytes) -> bytes:
    """BLAKE2b (RFC 7693) with a digest of 16 bytes."""
    return blake2b(data, digest_size=16).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32.

    Raises:
        InvalidRequestError: an id that is no integer in [0, 2**32).
    """
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(
            f"token ids must be integers in [0, {MAX_TOKEN_ID}]: {error}", "prompt_token_ids"
        ) from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _field(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    raw = text.encode("utf-8", "surrogatepass")
    return b"\x01" + len(raw).to_bytes(8, "little") + raw


class HashChain:
    """Hashes and packed tokens of one request's full blocks.

    ``root`` encodes salt and adapter as separate length-prefixed fields, so that no
    pair of values can be mistaken for another; it enters the first block's hash only.
    """

    __slots__ = ("_block_size", "_hash_fn", "hashes", "root", "tokens")

    def __init__(self, request: Request, block_size: int, hash_fn: HashFn) -> None:
        self._block_size = block_size
        self._hash_fn = hash_fn
        self.root = _field(request.cache_salt) + _field(request.adapter)
        self.tokens: list[bytes] = []  # per full block
        self.hashes: list[BlockHash] = []  # the request's own list
        request.block_hashes.clear()  # a request freed before starts afresh

    def extend(self, request: Request, known: Sequence["HashChain"] = ()) -> None:
        """Hash the blocks that became full since the last call into ``request.block_hashes``.

        The first call checks the tail's token ids too: a bad one is found at arrival.

        Args:
            known: chains of other requests; blocks that begin one of them are not hashed again.
        """
        size, done = self._block_size, len(self.tokens)
        full = len(request.token_ids) // size
        if full == done and done:
            return
        packed = request.packed_prompt
        if packed is None or done or len(request.token_ids) != request.num_prompt_tokens:
            packed = pack_tokens(request.token_ids[done * size :])
        request.packed_prompt = None
        if not done and known:
            self._take_common(packed, full, request.block_hashes, known)
            packed = packed[len(self.tokens) * 4 * size :]
            done = len(self.tokens)
        hashes, hash_fn, step = request.block_hashes, self._hash_fn, 4 * size
        parent = hashes[-1] if done else hash_fn(self.root)
        for start in range(0, (full - done) * step, step):
            chunk = packed[start : start + step]
            parent = BlockHash(hash_fn(parent + chunk))
            hashes.append(parent)
            self.tokens.append(chunk)
        self.hashes = hashes

    def _take_common(
        self,
        packed: bytes,
        full: int,
        hashes: list[BlockHash],
        known: Sequence["HashChain"],
    ) -> None:
        """Copy the longest run of blocks that a known chain has in common with ``packed``."""
        step = 4 * self._block_size
        best, source = 0, self
        for chain in known:
            # A request that is prepared again empties the hashes of its earlier chain.
            limit = min(full, len(chain.tokens), len(chain.hashes))
            if chain.root != self.root or limit <= best:
                continue
            # Deeper than the best so far? Most chains part here.
            if chain.tokens[best] != packed[best * step : (best + 1) * step]:
                continue
            depth = next(
                (i for i in range(limit) if chain.tokens[i] != packed[i * step : (i + 1) * step]),
                limit,
            )
            if depth > best:
                best, source = depth, chain
        if best:
            hashes.extend(source.hashes[:best])
            self.tokens.extend(source.tokens[:best])
