"""The prefix cache: verified hits, duplicates, provisional publications, the null cache."""

import pytest

from tests.engine.fake import make_request
from tiny_vllm.core.block_hash import HashFn, blake2b_128, pack_tokens
from tiny_vllm.core.block_pool import Block
from tiny_vllm.core.prefix_cache import NoPrefixCache, PrefixCache
from tiny_vllm.request import BlockId, Request


def blocks_of(*ids: int) -> list[Block]:
    return [Block(BlockId(i)) for i in ids]


def cache_with(token_ids: list[int], blocks: list[Block], hash_fn: HashFn = blake2b_128):
    cache = PrefixCache(2, hash_fn)
    cache.publish(make_request("first", token_ids), blocks, 0)
    return cache


def found(cache: PrefixCache, token_ids: list[int], **keys: str) -> list[int]:
    return [b.block_id for b in cache.match(make_request("asks", token_ids, **keys))]


def match_once(cache: PrefixCache, token_ids: list[int], **keys: str) -> list[int]:
    request = make_request("asks", token_ids, **keys)
    result = [b.block_id for b in cache.match(request)]
    cache.forget_request(request)
    return result


def test_longest_prefix_is_found_and_one_token_left():
    cache = cache_with([1, 2, 3, 4, 5, 6], blocks_of(7, 8, 9))
    assert match_once(cache, [1, 2, 3, 4, 5, 6, 7]) == [7, 8, 9]
    assert match_once(cache, [1, 2, 3, 4, 5, 6]) == [7, 8]
    assert match_once(cache, [1, 2, 3, 4, 9, 9, 9]) == [7, 8]
    assert match_once(cache, [1, 2]) == []
    assert match_once(cache, [9, 2, 3, 4, 5, 6, 7]) == []


def test_num_askable_leaves_a_token():
    cache = PrefixCache(4)
    assert [cache.num_askable(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_gap_in_the_chain_ends_the_hit():
    blocks = blocks_of(7, 8, 9)
    cache = cache_with([1, 2, 3, 4, 5, 6], blocks)
    cache.forget(blocks[1])
    assert match_once(cache, [1, 2, 3, 4, 5, 6, 7]) == [7]
    assert len(cache) == 2


def test_case_07_constant_hash_is_verified_by_tokens_root_and_ancestry():
    def constant(data: bytes) -> bytes:
        return b"x" * 16

    blocks = blocks_of(7, 8)
    cache = cache_with([1, 2, 3, 4], blocks, constant)
    assert blocks[1].entry is None  # its hash was taken: it stays private
    assert match_once(cache, [1, 2, 3, 4, 5]) == [7]
    assert match_once(cache, [3, 4, 5]) == []
    assert match_once(cache, [1, 2, 5], cache_salt="s") == []
    assert match_once(cache, [1, 2, 1, 2, 5]) == [7]  # tokens equal, ancestors not


def test_block_after_a_private_one_is_not_published():
    """Its hash is free and its own, but its prefix cannot be found."""

    def colliding(data: bytes) -> bytes:
        return b"x" * 16 if data.endswith(pack_tokens([3, 4])) else blake2b_128(data)

    cache, blocks = cache_with([9, 9, 3, 4], blocks_of(1, 2), colliding), blocks_of(7, 8, 9)
    request = make_request("second", [1, 2, 3, 4])
    cache.publish(request, blocks[:2], 0)
    request.token_ids += [5, 6]
    cache.publish(request, blocks[1:], 2)
    assert [b.entry is None for b in blocks] == [False, True, True]
    assert match_once(cache, [1, 2, 3, 4, 5, 6, 7]) == [7]


def test_duplicate_keeps_the_prefix_when_the_other_copy_goes():
    first, second = blocks_of(7), blocks_of(8)
    cache = cache_with([1, 2], first)
    cache.publish(make_request("second", [1, 2]), second, 0)
    assert len(cache) == 1
    cache.forget(first[0])
    assert match_once(cache, [1, 2, 3]) == [8]
    cache.forget(second[0])
    assert len(cache) == 0


def test_retract_takes_back_the_step_and_what_builds_on_it():
    cache = PrefixCache(2)
    old, own, child, apart = blocks_of(1), blocks_of(1, 2), blocks_of(2, 3), blocks_of(4)
    own[0] = old[0]
    child[0] = own[1]
    a, b = make_request("a", [1, 2, 3, 4]), make_request("b", [1, 2, 3, 4, 5, 6])
    cache.publish(a, old, 0)
    cache.commit()
    cache.publish(a, own, 1)
    cache.publish(b, child, 2)
    cache.publish(make_request("c", [8, 9]), apart, 0)
    assert [block.block_id for block in cache.retract({"a"})] == [2, 3]
    assert match_once(cache, [1, 2, 3, 4, 5, 6, 7]) == [1]
    assert match_once(cache, [8, 9, 9]) == [4]
    cache.check([*old, own[1], child[1], *apart])


def test_clear_forgets_blocks_too():
    blocks = blocks_of(7, 8)
    cache = cache_with([1, 2, 3, 4], blocks)
    cache.clear()
    assert len(cache) == 0
    assert [b.entry for b in blocks] == [None, None]
    assert cache.retract({"first"}) == []


def test_check_notices_a_lost_block():
    blocks = blocks_of(7, 8)
    cache = cache_with([1, 2, 3, 4], blocks)
    cache.check(blocks)
    blocks[1].entry = None
    with pytest.raises(AssertionError, match="lost"):
        cache.check(blocks)


def test_null_cache_has_the_same_face_and_hashes_nothing():
    cache, blocks = NoPrefixCache(2), blocks_of(7)
    request: Request = make_request("a", [1, 2, 3])
    cache.prepare(request)
    cache.publish(request, blocks, 0)
    assert found(cache, [1, 2, 3]) == []
    assert cache.num_askable(9) == 0
    assert (request.block_hashes, blocks[0].entry, len(cache)) == ([], None, 0)


def test_a_request_prepared_again_does_not_copy_from_its_emptied_chain() -> None:
    cache, request = PrefixCache(2), make_request("again", list(range(9)))
    cache.prepare(request)
    hashes = list(request.block_hashes)
    cache.forget_request(request)
    cache.prepare(request)
    assert len(hashes) == 4 and request.block_hashes == hashes
