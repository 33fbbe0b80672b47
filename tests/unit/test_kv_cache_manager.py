"""Block tables: look-up, allocation, publication, release, reset."""

import pytest

from tests.engine.fake import make_request
from tiny_vllm.core.kv_cache_manager import NO_HIT, KVCacheManager
from tiny_vllm.request import Request


def run(kv: KVCacheManager, request: Request, num_tokens: int) -> list[int] | None:
    """Admit or go on, as the scheduler does for one step."""
    hit = kv.lookup(request) if not request.block_ids else NO_HIT
    new = kv.allocate(request, num_tokens, hit)
    if new is not None:
        request.num_computed_tokens += num_tokens
        kv.commit()
    return new


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_blocks_follow_the_tokens():
    kv = KVCacheManager(8, 4)
    request = make_request("a", tokens(10))
    assert run(kv, request, 3) == [0]
    assert run(kv, request, 1) == []
    assert run(kv, request, 6) == [1, 2]
    assert request.block_ids == [0, 1, 2]
    assert kv.num_available_blocks == 5


def test_half_filled_block_is_never_published():
    kv = KVCacheManager(8, 4)
    request = make_request("a", tokens(12))
    for end, published in ((3, 0), (4, 1), (7, 1), (11, 2), (12, 3)):
        run(kv, request, end - request.num_computed_tokens)
        assert len(kv.cache) == published


def test_requests_that_grow_side_by_side_stay_consecutive():
    kv = KVCacheManager(24, 4)
    requests = [make_request(str(i), tokens(5, 100 * i), max_tokens=30) for i in range(2)]
    for request in requests:
        run(kv, request, 5)
    for _ in range(30):
        for request in requests:
            request.token_ids.append(1)
            run(kv, request, 1)
    for request in requests:
        first = request.block_ids[0]
        assert request.block_ids == list(range(first, first + 9))


def test_headroom_is_no_reservation():
    """With the pool nearly full, blocks left free for growth go to whoever needs them."""
    kv = KVCacheManager(8, 4)
    a, b = make_request("a", tokens(5), max_tokens=20), make_request("b", range(90, 109))
    run(kv, a, 5)
    run(kv, b, 19)
    assert len(b.block_ids) == 5 and kv.num_available_blocks == 1
    kv.check([a, b])


def test_blocks_are_usable_in_the_step_that_computes_them():
    kv = KVCacheManager(8, 4)
    a, b = make_request("a", tokens(9)), make_request("b", tokens(9))
    kv.allocate(a, 9, kv.lookup(a))
    hit = kv.lookup(b)
    assert (hit.num_tokens, hit.num_asked) == (8, 2)
    assert kv.allocate(b, 1, hit) == [0, 1, 4]  # 3 is where a will grow
    assert b.num_computed_tokens == 8
    kv.check([a, b])


def test_allocate_is_all_or_nothing():
    kv = KVCacheManager(4, 4)
    a, b = make_request("a", tokens(12)), make_request("b", tokens(12))
    run(kv, a, 12)
    kv.free(a)
    holder = make_request("c", tokens(8, 50))
    run(kv, holder, 8)  # one free, one of a's evicted; two of a's stay cached
    assert kv.lookup(b).num_tokens == 8
    blocker = make_request("d", tokens(1, 90))
    run(kv, blocker, 1)
    before = kv.num_available_blocks
    hit = kv.lookup(b)
    assert kv.allocate(b, 12 - hit.num_tokens, hit) is None
    assert (kv.num_available_blocks, b.block_ids, b.num_computed_tokens) == (before, [], 0)


def test_fits_counts_unreferenced_hits_as_taken():
    kv = KVCacheManager(4, 4)
    a, b = make_request("a", tokens(9)), make_request("b", tokens(9))
    run(kv, a, 9)
    assert kv.fits(b, kv.lookup(b), reserve=0)  # two shared, one new
    assert not kv.fits(b, kv.lookup(b), reserve=1)
    kv.free(a)
    assert kv.fits(b, kv.lookup(b), reserve=1)
    assert not kv.fits(b, kv.lookup(b), reserve=2)


def test_release_keeps_blocks_cached_and_free_forgets_the_request():
    kv = KVCacheManager(8, 4)
    a = make_request("a", tokens(9))
    run(kv, a, 9)
    kv.release(a)
    a.num_computed_tokens = 0
    assert a.block_ids == []
    assert kv.num_available_blocks == 8
    assert kv.lookup(a).num_tokens == 8
    assert len(a.block_hashes) == 2


def test_use_prefix_cache_false_finds_nothing_and_asks_nothing():
    kv = KVCacheManager(8, 4)
    run(kv, make_request("a", tokens(9)), 9)
    assert kv.lookup(make_request("b", tokens(9), use_prefix_cache=False)) == NO_HIT


def test_tokens_lost_leaves_out_what_others_hold():
    kv = KVCacheManager(8, 4)
    a, b = make_request("a", tokens(9)), make_request("b", tokens(8) + [77, 78, 79])
    run(kv, a, 9)
    assert kv.tokens_lost(a) == 9
    run(kv, b, 3)
    assert (kv.tokens_lost(a), kv.tokens_lost(b)) == (1, 3)
    kv.free(b)
    assert kv.tokens_lost(a) == 9


def test_retract_names_the_blocks_and_hands_them_out_first():
    kv = KVCacheManager(4, 4)
    a = make_request("a", tokens(8))
    kv.allocate(a, 8)
    kv.free(a)
    assert kv.retract({a.request_id}) == {0, 1}
    assert len(kv.cache) == 0
    kv.pool.check()
    b = make_request("b", tokens(1))
    kv.allocate(b, 1)
    assert b.block_ids[0] in (0, 1)


def test_commit_makes_publications_firm():
    kv = KVCacheManager(4, 4)
    a = make_request("a", tokens(8))
    run(kv, a, 8)
    assert kv.retract({a.request_id}) == set()
    assert len(kv.cache) == 2


def test_reset_refuses_while_blocks_are_held_then_starts_afresh():
    kv = KVCacheManager(4, 4)
    a = make_request("a", tokens(9))
    run(kv, a, 9)
    assert not kv.reset()
    kv.free(a)
    assert kv.reset()
    assert kv.lookup(make_request("b", tokens(9))).num_tokens == 0
    b = make_request("c", tokens(9))
    assert run(kv, b, 9) == [0, 1, 2]
    kv.check([b])


def test_room_is_the_rest_of_the_table_and_the_pool():
    kv = KVCacheManager(4, 4)
    a = make_request("a", tokens(16))
    assert kv.room(a) == kv.capacity == 16
    run(kv, a, 6)
    assert kv.room(a) == 10


@pytest.mark.parametrize("enabled", [True, False])
def test_check_notices_a_wrong_reference(enabled):
    kv = KVCacheManager(4, 4, enabled)
    a = make_request("a", tokens(6))
    run(kv, a, 6)
    kv.check([a])
    with pytest.raises(AssertionError, match="!="):
        kv.check([])


def test_freed_request_may_come_again():
    """A new chain on old hashes would pair them with the wrong tokens."""
    kv = KVCacheManager(8, 4)
    a = make_request("a", tokens(9))
    run(kv, a, 9)
    kv.free(a)
    a.num_computed_tokens = 0
    assert kv.lookup(a).num_tokens == 8
    a.token_ids[:] = tokens(13)
    kv.free(a)
    run(kv, a, 5)
    assert len(a.block_hashes) == 3
    assert len(kv.cache) == 3
    kv.check([a])
