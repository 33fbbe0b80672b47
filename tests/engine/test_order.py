"""Real scheduler, fake model: the order in which waiting requests start."""

from tests.engine.fake import Driver
from tests.engine.test_prefix_sharing import prompt_of
from tiny_vllm.core.queue import MAX_PASSED

B = 4


def starts(driver: Driver) -> list[str]:
    """Requests in the order in which the runner saw them first."""
    return [new.request_id for step in driver.runner.steps for new in step.new_requests]


def warm(index: int) -> list[int]:
    return prompt_of(4 * B) + prompt_of(3, seed=index + 100)


def test_prefix_order_takes_the_longest_cached_prefix_first():
    driver = Driver(schedule="prefix", max_num_seqs=1)
    driver.generate("seen", prompt_of(8 * B), 1)
    driver.add("cold", prompt_of(9, seed=5), 2)
    driver.add("half", prompt_of(4 * B) + prompt_of(3, seed=6), 2)
    driver.add("most", prompt_of(7 * B) + prompt_of(3, seed=7), 2)
    driver.add("also cold", prompt_of(9, seed=8), 2)
    driver.run().assert_solo()
    assert starts(driver) == ["seen", "most", "half", "cold", "also cold"]


def test_fcfs_order_stays_that_of_arrival():
    driver = Driver(max_num_seqs=1)
    driver.generate("seen", prompt_of(8 * B), 1)
    driver.add("cold", prompt_of(9, seed=5), 2)
    driver.add("warm", warm(0), 2)
    driver.run()
    assert starts(driver) == ["seen", "cold", "warm"]


def test_a_cold_request_starts_within_the_stated_number_of_admissions():
    """Warm requests arrive without end; two cold ones wait among them."""
    driver = Driver(schedule="prefix", max_num_seqs=2, num_blocks=256)
    driver.generate("seen", warm(0), 1)
    for index in range(3):
        driver.add(f"w{index}", warm(index), 2)
    driver.add("cold1", prompt_of(9, seed=5), 2)
    driver.add("cold2", prompt_of(9, seed=6), 2)
    count = 3
    while not {"cold1", "cold2"} <= driver.finished.keys():
        while driver.scheduler.num_waiting < 6:
            driver.add(f"w{count}", warm(count), 2)
            count += 1
        driver.step()
        assert count < 5 * MAX_PASSED, "a cold request starves"
    order = starts(driver)[1:]
    assert order.index("cold1") > 20  # it was passed indeed
    assert order.index("cold1") <= MAX_PASSED + 3
    assert order.index("cold2") <= MAX_PASSED + 4
    driver.run().assert_solo()


def test_a_preempted_request_goes_first_in_prefix_order_too():
    driver = Driver(schedule="prefix", num_blocks=14)
    for name in "abcd":
        driver.add(name, prompt_of(2 * B, seed=ord(name)), 30)
    driver.run().assert_solo()
    assert driver.scheduler.ledger.num_preemptions > 0
