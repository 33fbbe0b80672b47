"""Real scheduler, fake model: what the prefix cache may and may not share."""

import random

import pytest

from tests.engine.fake import Driver, make_request, solo
from tiny_vllm.errors import RequestTooLongError

B = 4


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B + 1, 3 * B])
def test_case_01_exact_multiple_full_hit(length, partial):
    driver = Driver(enable_partial_block_reuse=partial)
    cold = driver.generate("cold", prompt_of(length))
    before = driver.runner.num_forward_tokens
    warm = driver.generate("warm", prompt_of(length))
    driver.assert_solo()
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (length - 1 if partial else (length - 1) // B * B)
    prompt_tokens = driver.runner.num_forward_tokens - before - 3  # 3 decodes feed back
    assert prompt_tokens == length - warm.num_cached_tokens
    assert 1 <= prompt_tokens <= B
    assert driver.finished["warm"].num_cached_tokens == warm.num_cached_tokens


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_case_03_max_tokens_1_on_a_miss_and_on_a_full_hit(chunk, partial):
    driver = Driver(max_num_batched_tokens=chunk, enable_partial_block_reuse=partial)
    for name in ("miss", "hit"):
        request = driver.generate(name, prompt_of(3 * B), 1)
        assert driver.tokens[name] == solo(prompt_of(3 * B), 1)
        assert driver.finished[name].finish_reason == "length"
        assert request.metrics.first_token_time == request.metrics.token_times[-1]
        assert len(request.metrics.token_times) == 1
    assert driver.requests["hit"].num_cached_tokens == (3 * B - 1 if partial else 2 * B)
    assert driver.scheduler.ledger.decoded_tokens == 0


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("count", [2, 32])
@pytest.mark.parametrize("chunk", [B - 1, 10, 512])
def test_case_04_equal_prompts_in_one_step_cost_one_prefill(count, chunk, partial):
    length = 5 * B + 3
    driver = Driver(
        max_num_batched_tokens=chunk, num_blocks=256, enable_partial_block_reuse=partial
    )
    names = [str(i) for i in range(count)]
    for name in names:
        driver.add(name, prompt_of(length), 3 if chunk > B else 2)
    tables = []
    while driver.scheduler.has_unfinished_requests():
        driver.step()
        tables.append([r.block_ids[:5] for r in driver.requests.values() if len(r.block_ids) > 5])
    driver.assert_solo()
    ledger = driver.scheduler.ledger
    if partial:  # whoever comes in a later step than the first computes its last token alone
        assert length + count - 1 <= ledger.computed_tokens <= length + 3 * (count - 1)
    else:
        assert ledger.computed_tokens == length + 3 * (count - 1)
    shared = max(tables, key=len)
    assert len(shared) >= min(2, chunk // B + 1)
    assert all(table == shared[0] for table in shared)


def test_case_04_the_pair_runs_in_the_same_step():
    """The second request uses blocks that the first computes in that very step."""
    driver = Driver()
    for name in "ab":
        driver.add(name, prompt_of(5 * B + 3))
    step = driver.step()
    assert step.num_scheduled_tokens == {"a": 23, "b": 3}
    assert driver.scheduler.cached_tokens_last_step == 20
    assert driver.scheduler.blocks_used == 7
    driver.run().assert_solo()


def test_case_05_tail_is_evicted_first_and_a_re_run_hits_the_rest():
    driver = Driver(num_blocks=5)
    driver.generate("chain", prompt_of(3 * B), 1)  # 3 published blocks
    driver.generate("filler", prompt_of(2 * B + 1, seed=1), 1)  # takes 2 free and 1 cached
    again = driver.generate("again", [*prompt_of(3 * B), 7], 1)
    assert again.num_cached_tokens == 2 * B
    driver.assert_solo()


def test_case_05_without_ancestors_descendants_give_no_hit_and_are_reclaimed():
    driver = Driver(num_blocks=5)
    driver.generate("chain", prompt_of(3 * B), 1)
    driver.generate("flood", prompt_of(5 * B - 1, seed=1), 1)  # the whole pool
    assert driver.generate("again", [*prompt_of(3 * B), 7], 1).num_cached_tokens == 0
    driver.assert_solo()


def test_case_06_no_block_of_a_running_request_is_handed_out():
    """The fake runner reads A's whole context in every step, so a stolen block would show."""
    driver = Driver(num_blocks=40, max_num_batched_tokens=16)
    driver.add("A", prompt_of(3 * B), 60)
    driver.step()
    flood = 0
    while "A" not in driver.finished:
        if driver.scheduler.num_waiting < 2:
            driver.add(f"u{flood}", prompt_of(19, seed=flood + 1), 2)
            flood += 1
        held = set(driver.requests["A"].block_ids)
        step = driver.step()
        for new in step.new_requests:
            assert held.isdisjoint(new.block_ids)
    assert flood > 10
    assert driver.requests["A"].num_preemptions == 0
    driver.run().assert_solo()


def test_case_07_colliding_hash_shares_nothing_wrong():
    driver = Driver(hash_fn=lambda data: b"same" * 4)
    prompts = [prompt_of(3 * B + 1), prompt_of(3 * B + 1, seed=1)]
    prompts.append(prompts[1][:B] + prompts[0][B:])
    prompts.append(prompts[0][B:] + [5])  # block 2 of the first, as a first block
    for index, prompt in enumerate(prompts):
        driver.add(f"{index}", prompt)
    for index, prompt in enumerate(prompts):
        driver.add(f"salted{index}", prompt, cache_salt="s")
    driver.run().assert_solo()
    assert [r.num_cached_tokens for r in driver.requests.values()] == [0] * 8
    assert driver.generate("again", prompts[0]).num_cached_tokens == B


def test_case_16_salt_and_adapter_isolate_and_are_not_confused():
    driver = Driver()
    keys = [{}, {"cache_salt": "s1"}, {"cache_salt": "s2"}, {"adapter": "s1"}, {"adapter": "b"}]
    keys += [{"cache_salt": ""}, {"cache_salt": "s1", "adapter": "b"}]
    for index, key in enumerate(keys):
        assert driver.generate(f"cold{index}", prompt_of(2 * B + 1), **key).num_cached_tokens == 0
    for index, key in enumerate(keys):
        hit = driver.generate(f"warm{index}", prompt_of(2 * B + 1), **key)
        assert hit.num_cached_tokens == 2 * B


@pytest.mark.parametrize("partial", [False, True])
def test_case_21_a_share_below_a_block(partial):
    driver = Driver(enable_partial_block_reuse=partial)
    common = prompt_of(B - 1)
    driver.generate("first", [*common, 1, 2])
    second = driver.generate("second", [*common, 3, 4])
    assert second.num_cached_tokens == (B - 1 if partial else 0)
    ledger = driver.scheduler.ledger
    assert ledger.copied_tokens == second.num_cached_tokens
    assert (ledger.blocks_found, ledger.blocks_asked) == (0, 2)
    driver.assert_solo()


def test_generated_tokens_are_shared_too():
    driver = Driver()
    first = driver.generate("first", prompt_of(2 * B), 2 * B + 1)
    turn = driver.generate("second", [*first.token_ids, 1, 2])
    assert turn.num_cached_tokens == 4 * B
    driver.assert_solo()


def test_use_prefix_cache_false_computes_all_and_still_publishes():
    driver = Driver()
    driver.generate("first", prompt_of(2 * B + 1))
    bypass = driver.generate("bypass", prompt_of(3 * B + 1), use_prefix_cache=False)
    assert bypass.num_cached_tokens == 0
    assert driver.scheduler.ledger.blocks_asked == 2  # only the first one's
    assert driver.generate("third", prompt_of(3 * B + 1)).num_cached_tokens == 3 * B
    driver.assert_solo()


def test_duplicates_keep_a_prefix_alive():
    """Two copies of a prefix, one longer: the shorter one's eviction must not orphan the rest."""
    driver = Driver(num_blocks=12)
    driver.generate("short", prompt_of(2 * B + 1), 1)
    driver.generate("long", prompt_of(4 * B + 1), 1, use_prefix_cache=False)
    driver.generate("filler", prompt_of(5 * B, seed=3), 1)  # evicts the older copy
    assert driver.generate("again", prompt_of(4 * B + 1), 1).num_cached_tokens == 4 * B
    driver.assert_solo()


@pytest.mark.parametrize("chunk", [5, 16, 64])
def test_cache_on_equals_cache_off(chunk):
    outputs = []
    for enabled in (True, False):
        driver = Driver(enable_prefix_caching=enabled, max_num_batched_tokens=chunk)
        for index in range(12):
            driver.add(f"{index}", prompt_of(9) + prompt_of(7, seed=index % 4), 9)
        driver.run().assert_solo()
        outputs.append(driver.tokens)
        assert (driver.scheduler.ledger.cached_tokens > 0) == enabled
        assert (driver.scheduler.ledger.blocks_asked > 0) == enabled
    assert outputs[0] == outputs[1]


def test_reset_forgets_all_but_not_under_running_requests():
    driver = Driver()
    driver.add("a", prompt_of(2 * B + 1), 9)
    driver.step()
    assert not driver.scheduler.reset_prefix_cache()
    driver.run()
    assert driver.scheduler.reset_prefix_cache()
    assert driver.generate("b", prompt_of(2 * B + 1)).num_cached_tokens == 0
    assert driver.requests["b"].request_id == "b"
    driver.assert_solo()


def test_prompts_of_a_fresh_pool_lie_in_consecutive_blocks():
    driver = Driver(num_blocks=32)
    for round_ in range(3):  # also after blocks were freed tail first and evicted
        driver.add(f"{round_}", prompt_of(20 * B, seed=round_), 1)
        ids = []
        while driver.scheduler.has_unfinished_requests():
            for new in driver.step().new_requests:
                ids += new.block_ids
        assert ids[:10] == list(range(ids[0], ids[0] + 10))


def test_refused_request_leaves_nothing_behind():
    driver = Driver(num_blocks=4)
    with pytest.raises(RequestTooLongError):
        driver.scheduler.add_request(make_request("big", prompt_of(40)))
    assert not driver.scheduler.has_unfinished_requests()
    driver.generate("ok", prompt_of(8))
    driver.assert_solo()
