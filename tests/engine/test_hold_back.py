"""Real scheduler, fake model: equal beginnings that arrive together are computed once."""

import pytest

from tests.engine.fake import Driver
from tests.engine.test_prefix_sharing import prompt_of
from tiny_vllm.config import EngineConfig
from tiny_vllm.core.hold_back import MIN_SAVED_TOKENS
from tiny_vllm.errors import ConfigError

B = 4
BIG = 128


def add_many(driver: Driver, count: int, common: int, own: int = 5, **kw: object) -> None:
    for index in range(count):
        driver.add(f"{index}", prompt_of(common) + prompt_of(own, seed=index + 1), 3, **kw)


@pytest.mark.parametrize("chunk", [50, 170, 4000])
@pytest.mark.parametrize("common", [100, BIG, 3 * BIG + 100])
@pytest.mark.parametrize("count", [6, 24])
def test_equal_beginnings_cost_one_prefill(count, common, chunk):
    """Also when the common part ends inside a large block, and spans many chunks."""
    driver = Driver(block_size=BIG, max_num_batched_tokens=chunk, num_blocks=256)
    add_many(driver, count, common)
    driver.run().assert_solo()
    ledger = driver.scheduler.ledger
    # what is not worth a wait may be computed again
    slack = min(MIN_SAVED_TOKENS, (count - 1) * (common % BIG))
    assert ledger.computed_tokens <= common + 5 * count + slack
    assert ledger.cached_tokens >= (count - 1) * common - slack


def test_held_requests_and_steps_are_counted_and_reported():
    driver = Driver(block_size=BIG, max_num_batched_tokens=4000)
    add_many(driver, 12, 100)
    driver.step()
    assert driver.scheduler.num_running == 1
    driver.run().assert_solo()
    ledger = driver.scheduler.ledger
    assert ledger.computed_tokens == 100 + 12 * 5
    assert (ledger.held_requests, ledger.held_steps) == (11, 11)
    assert driver.requests["5"].cache_report.held_steps == 1
    assert str(driver.requests["5"].cache_report).startswith("held for 1 step; tokens 0-99 hit")


def test_a_tree_of_prompts_costs_its_unique_tokens():
    """Two levels: a common beginning, three documents, four questions each."""
    driver = Driver(block_size=BIG, max_num_batched_tokens=4000, num_blocks=64)
    for document in range(3):
        for question in range(4):
            prompt = prompt_of(BIG + 60) + prompt_of(2 * BIG, seed=7 + document)
            driver.add(f"{document}/{question}", prompt + prompt_of(9, seed=50 + question), 2)
    driver.run().assert_solo()
    unique = BIG + 60 + 3 * 2 * BIG + 12 * 9
    # a branch below a block that nobody waits for: at most once a document and question
    assert unique <= driver.scheduler.ledger.computed_tokens <= unique + 3 * MIN_SAVED_TOKENS


def leader_and_follower(chunk: int = 8, **changes: object) -> Driver:
    """The leader is in the middle of its prompt when the follower could start."""
    driver = Driver(max_num_batched_tokens=64, **changes)
    driver.add("leader", prompt_of(10 * B + 1), 9)
    room = driver.scheduler.kv.room
    driver.scheduler.kv.room = lambda request: min(chunk, room(request))  # type: ignore[method-assign]
    start = driver.scheduler._start
    driver.scheduler._start = lambda plan, request, hit, n: start(  # type: ignore[method-assign]
        plan, request, hit, min(n, chunk)
    )
    driver.step()
    driver.add("follower", prompt_of(10 * B) + [7777], 3)
    return driver


def test_a_follower_waits_while_its_leader_is_in_mid_prefill():
    driver = leader_and_follower()
    driver.step()
    assert driver.scheduler.num_running == 1 and driver.scheduler.num_waiting == 1
    driver.add("other", prompt_of(9, seed=3), 3)  # not held: it passes
    driver.step()
    assert driver.requests["other"].num_computed_tokens > 0
    driver.run().assert_solo()
    assert driver.requests["follower"].num_cached_tokens == 10 * B
    assert driver.scheduler.ledger.held_requests == 1
    assert driver.scheduler.ledger.held_steps >= 3


@pytest.mark.parametrize("how", ["abort", "fail", "preempt"])
def test_a_follower_is_free_again_when_its_leader_is_gone(how):
    driver = leader_and_follower()
    driver.step()
    assert driver.requests["follower"].num_held_steps == 1
    if how == "abort":
        driver.abort("leader")
    elif how == "fail":
        driver.runner.fail["leader"] = "boom"
        driver.step()
    else:
        driver.scheduler._preempt(driver.requests["leader"])
        driver.abort("leader")
    held = driver.requests["follower"].num_held_steps
    driver.step()
    assert driver.requests["follower"].num_held_steps == held
    assert driver.scheduler.num_running == 1
    driver.run().assert_solo("follower")


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_the_wait_is_bounded(limit):
    driver = leader_and_follower(max_held_steps=limit)
    for _ in range(limit):
        driver.step()
        assert driver.scheduler.num_running == 1
    driver.step()
    assert driver.scheduler.num_running == 2
    assert driver.requests["follower"].num_held_steps == limit
    driver.run().assert_solo()
    assert driver.scheduler.ledger.held_requests == (limit > 0)


def test_salts_do_not_wait_for_each_other():
    driver = Driver(block_size=BIG, max_num_batched_tokens=4000)
    for index in range(12):
        driver.add(f"{index}", prompt_of(100), 3, cache_salt=f"{index}")
    driver.step()
    assert driver.scheduler.num_running == 12


@pytest.mark.parametrize("off", ["enable_prefix_caching", "enable_partial_block_reuse"])
def test_nobody_waits_for_what_cannot_be_reused(off):
    driver = Driver(block_size=BIG, max_num_batched_tokens=4000, **{off: False})
    add_many(driver, 12, 100)
    driver.step()
    assert driver.scheduler.num_running == 12


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_a_bad_bound_is_refused(value):
    with pytest.raises(ConfigError, match="max_held_steps"):
        EngineConfig(max_held_steps=value)
