"""The block pool: order of the free list, references, and its own alarm."""

import pytest

from tiny_vllm.core.block_pool import Block, BlockPool, PrefixEntry
from tiny_vllm.request import BlockHash


def make_pool(num_blocks: int = 6) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []

    def on_evict(block: Block) -> None:
        evicted.append(block.block_id)
        block.entry = None

    return BlockPool(num_blocks, on_evict), evicted


def publish(blocks: list[Block]) -> None:
    for block in blocks:
        block.entry = PrefixEntry(BlockHash(b"h"), b"", b"")


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_fresh_pool_hands_out_consecutive_ids():
    pool, _ = make_pool()
    assert ids(pool.allocate(3)) == [0, 1, 2]
    assert ids(pool.allocate(0)) == []
    assert ids(pool.allocate(3)) == [3, 4, 5]
    assert (pool.num_available, pool.num_referenced) == (0, 6)
    pool.check()


def test_tail_is_evicted_before_head():
    pool, evicted = make_pool(3)
    chain = pool.allocate(3)
    publish(chain)
    pool.release(chain)
    for block_id in (2, 1, 0):
        assert ids(pool.allocate(1)) == [block_id]
    assert evicted == [2, 1, 0]


def test_eviction_is_lazy():
    pool, evicted = make_pool(4)
    chain = pool.allocate(2)
    publish(chain)
    pool.release(chain)
    assert ids(pool.allocate(2)) == [2, 3]
    assert evicted == []
    assert all(block.entry for block in chain)


def test_blocks_that_cannot_be_hit_go_first():
    pool, evicted = make_pool(4)
    chain = pool.allocate(4)
    publish(chain[:3])
    pool.release(chain)
    assert ids(pool.allocate(1)) == [3]
    assert evicted == []


def test_unpublished_run_is_handed_out_in_ascending_order_again():
    pool, _ = make_pool(6)
    run = pool.allocate(4)
    pool.release(run)
    assert [ids(pool.allocate(1))[0] for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_hit_takes_a_block_from_the_middle_of_the_free_list():
    pool, evicted = make_pool(3)
    chain = pool.allocate(3)
    publish(chain)
    pool.release(chain)
    pool.acquire(chain[1])
    pool.check()
    assert ids(pool.allocate(2)) == [0, 2]
    assert evicted == [2, 0]
    assert chain[1].entry is not None


def test_block_is_free_only_after_the_last_reference():
    pool, _ = make_pool(2)
    blocks = pool.allocate(1)
    pool.acquire(blocks[0])
    pool.release(blocks)
    assert pool.num_available == 1
    pool.release(blocks)
    assert pool.num_available == 2
    with pytest.raises(AssertionError, match="too often"):
        pool.release(blocks)


def test_more_than_available_is_an_internal_error():
    pool, _ = make_pool(2)
    with pytest.raises(AssertionError, match="3 > 2"):
        pool.allocate(3)


def test_demoted_block_is_handed_out_first():
    pool, _ = make_pool(3)
    chain = pool.allocate(3)
    publish(chain)
    pool.release(chain)
    chain[0].entry = None
    pool.demote(chain[0])
    assert ids(pool.allocate(1)) == [0]


def test_restore_order_refuses_while_referenced():
    pool, _ = make_pool(3)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.release(first)
    with pytest.raises(AssertionError, match="referenced"):
        pool.restore_order()
    pool, _ = make_pool(3)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.release(first)
    pool.release(second)
    pool.restore_order()
    assert ids(pool.allocate(3)) == [0, 1, 2]


@pytest.mark.parametrize("fault", ["count", "reference", "link"])
def test_check_notices(fault):
    pool, _ = make_pool(4)
    pool.allocate(1)
    if fault == "count":
        pool.num_available += 1
    elif fault == "reference":
        pool.blocks[2].ref_count = 1
    else:
        pool.blocks[3].prev = pool.blocks[0]
    with pytest.raises(AssertionError):
        pool.check()
