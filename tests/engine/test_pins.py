"""Real scheduler, fake model: pinned prefixes stay, within their bound, and starve nobody."""

import pytest

from tests.engine.fake import Driver, make_request
from tests.engine.test_prefix_sharing import prompt_of
from tiny_vllm.config import EngineConfig
from tiny_vllm.core import pins as pins_module
from tiny_vllm.core.pins import Pin
from tiny_vllm.errors import ConfigError, InvalidRequestError

B = 4


def pin(driver: Driver, length: int, seed: int = 0, ttl: float | None = None, **key: str) -> Pin:
    return driver.scheduler.pin(make_request("pin", prompt_of(length, seed), **key), ttl)


def flood(driver: Driver, count: int = 12) -> None:
    for index in range(count):
        driver.generate(f"flood{index}", prompt_of(5 * B, seed=50 + index), 2)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_pinned_prefix_outlives_a_flood(pinned):
    driver = Driver(num_blocks=16)
    driver.generate("first", prompt_of(5 * B + 1), 1)
    if pinned:
        assert pin(driver, 5 * B)[1] == 5 * B
    flood(driver)
    again = driver.generate("again", prompt_of(5 * B + 1), 1)
    assert again.num_cached_tokens == (5 * B if pinned else 0)
    driver.assert_solo()
    driver.scheduler.check_invariants()


def test_only_what_is_cached_is_pinned_and_a_salt_has_its_own():
    driver = Driver()
    driver.generate("first", prompt_of(2 * B + 1), 1)
    assert pin(driver, 5 * B).num_tokens == 2 * B
    assert pin(driver, 2 * B, cache_salt="s").num_tokens == 0
    assert driver.scheduler.blocks_used == 2


def test_unpin_makes_the_blocks_ordinary_again():
    driver = Driver(num_blocks=16)
    driver.generate("first", prompt_of(5 * B + 1), 1)
    kept = pin(driver, 5 * B)
    assert driver.scheduler.unpin(kept.pin_id)
    assert not driver.scheduler.unpin(kept.pin_id)
    assert driver.scheduler.blocks_used == 0
    flood(driver)
    assert driver.generate("again", prompt_of(5 * B + 1), 1).num_cached_tokens == 0


def test_a_pin_ends_with_its_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(pins_module.time, "perf_counter", lambda: now[0])
    driver = Driver(num_blocks=16)
    driver.generate("first", prompt_of(5 * B + 1), 1)
    pin(driver, 2 * B, ttl=50.0)
    pin(driver, 5 * B, ttl=10.0)
    now[0] += 9.9
    driver.step()
    assert driver.scheduler.blocks_used == 5
    now[0] += 0.1
    driver.step()
    assert driver.scheduler.blocks_used == 2
    now[0] += 40.0
    driver.step()
    assert driver.scheduler.blocks_used == 0


def test_a_pin_whose_time_is_over_is_gone_also_where_nothing_runs(monkeypatch):
    """Its time was looked at in steps alone: it still counted, and unpin gave True."""
    now = [100.0]
    monkeypatch.setattr(pins_module.time, "perf_counter", lambda: now[0])
    driver = Driver(num_blocks=16)
    driver.generate("first", prompt_of(5 * B + 1), 1)
    kept = [pin(driver, 2 * B, ttl=5), pin(driver, 5 * B, ttl=5)]
    now[0] = 106.0
    pin(driver, B)
    assert driver.scheduler.kv.pins.num_blocks == 1
    assert not any(driver.scheduler.unpin(one.pin_id) for one in kept)
    driver.scheduler.check_invariants()


def test_beyond_the_bound_is_refused_with_both_numbers_and_nothing_changes():
    driver = Driver(num_blocks=16, max_pinned_share=0.5)
    driver.generate("a", prompt_of(5 * B + 1), 1)
    driver.generate("b", prompt_of(5 * B + 1, seed=1), 1)
    pin(driver, 5 * B)
    pin(driver, 5 * B)  # the same blocks: they count once
    with pytest.raises(InvalidRequestError, match="5 more pinned blocks, and 5 of at most 8"):
        pin(driver, 5 * B, seed=1)
    assert pin(driver, 3 * B, seed=1).num_tokens == 3 * B
    assert driver.scheduler.blocks_used == 8
    driver.scheduler.check_invariants()


def test_pins_yield_to_a_request_that_could_not_start_otherwise():
    driver = Driver(num_blocks=16)
    driver.generate("first", prompt_of(5 * B + 1), 1)
    pin(driver, 5 * B)
    driver.generate("large", prompt_of(14 * B, seed=3), 3)
    driver.assert_solo()
    assert len(driver.scheduler.kv.pins) == 0


def test_pins_yield_to_a_request_that_could_not_go_on_otherwise():
    driver = Driver(num_blocks=16)
    driver.generate("first", prompt_of(5 * B + 1), 1)
    pin(driver, 5 * B)
    driver.generate("grows", prompt_of(9, seed=3), 50)
    driver.assert_solo()
    assert len(driver.scheduler.kv.pins) == 0
    assert driver.requests["grows"].num_preemptions == 0


def test_pins_stay_while_requests_can_make_room_for_each_other():
    driver = Driver(num_blocks=16)
    driver.generate("first", prompt_of(5 * B + 1), 1)
    pin(driver, 5 * B)
    for index in range(6):
        driver.add(f"{index}", prompt_of(9, seed=index + 5), 12)
    driver.run().assert_solo()
    assert len(driver.scheduler.kv.pins) == 1


def test_reset_drops_pins_but_not_while_requests_run():
    driver = Driver()
    driver.generate("first", prompt_of(5 * B + 1), 1)
    pin(driver, 5 * B)
    driver.add("running", prompt_of(5 * B + 1), 5)
    driver.step()
    assert not driver.scheduler.reset_prefix_cache()
    assert len(driver.scheduler.kv.pins) == 1
    driver.abort("running")
    driver.step()
    assert driver.scheduler.reset_prefix_cache()
    assert driver.scheduler.blocks_used == 0
    driver.check_idle()


@pytest.mark.parametrize("share", [-0.1, 0.95, "0.5", True])
def test_a_bad_share_is_refused(share):
    with pytest.raises(ConfigError, match="max_pinned_share"):
        EngineConfig(max_pinned_share=share)
