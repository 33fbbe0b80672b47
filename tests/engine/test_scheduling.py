"""Real scheduler, fake model: chunks, preemption, aborts, errors, limits, fairness."""

import random

import pytest

from tests.engine.fake import GARBAGE, Driver, make_request, solo
from tiny_vllm.core.stop import KV_CACHE_FULL
from tiny_vllm.errors import InvalidRequestError, RequestTooLongError
from tiny_vllm.outputs import FinishReason

B = 4


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def _preempting_driver(**changes) -> Driver:
    """Four requests of 2 blocks + 25 output tokens each in a pool for about two."""
    driver = Driver(num_blocks=18, **changes)
    for index in range(4):
        driver.add(f"{index}", prompt_of(2 * B, seed=index), 25)
    return driver


@pytest.mark.parametrize("enabled", [True, False])
def test_case_08_preempt_and_resume(enabled):
    driver = _preempting_driver(enable_prefix_caching=enabled)
    first_times: dict[str, float] = {}
    while driver.scheduler.has_unfinished_requests():
        driver.step()
        for name, request in driver.requests.items():
            if request.metrics.first_token_time is not None:
                first_times.setdefault(name, request.metrics.first_token_time)
    driver.check_idle()
    driver.assert_solo()
    ledger = driver.scheduler.ledger
    assert ledger.num_preemptions == sum(r.num_preemptions for r in driver.requests.values()) > 0
    for name, request in driver.requests.items():
        assert request.metrics.first_token_time == first_times[name]
        assert len(request.metrics.token_times) == 25
        assert request.metrics.num_preemptions == request.num_preemptions
    assert (ledger.prompt_tokens, ledger.computed_tokens) == (32, 32)
    assert (ledger.cached_tokens, ledger.blocks_found) == (0, 0)
    assert ledger.blocks_asked == (4 if enabled else 0)
    assert ledger.recomputed_tokens + ledger.cached_tokens_resumed > 0
    assert (ledger.blocks_asked_resumed > 0) == enabled
    assert ledger.decoded_tokens == 4 * 24


def test_case_08_victim_loses_least_work():
    """The oldest request has most to lose, and is never the victim."""
    driver = _preempting_driver()
    driver.run()
    assert driver.requests["0"].num_preemptions == 0
    assert driver.requests["3"].num_preemptions > 0


def test_case_08_victim_is_the_one_with_little_work_even_if_older():
    driver = Driver(num_blocks=9)
    driver.add("little", prompt_of(4), 14)
    driver.add("much", prompt_of(20, seed=1), 14)
    driver.run().assert_solo()
    assert driver.requests["little"].num_preemptions > 0
    assert driver.requests["much"].num_preemptions == 0


def test_case_08_shared_blocks_are_no_lost_work():
    """Both hold the long prefix, so the newer one has only its own tail to lose."""
    driver = Driver(num_blocks=13)
    driver.add("old", prompt_of(20) + prompt_of(6, seed=3), 14)
    driver.add("new", prompt_of(20) + prompt_of(2, seed=1), 14)
    driver.add("middle", prompt_of(7, seed=2), 14)
    while not driver.scheduler.ledger.num_preemptions:
        driver.step()
    assert driver.requests["new"].num_preemptions == 1
    driver.run().assert_solo()


def test_preempted_step_admits_nobody():
    driver = _preempting_driver()
    driver.add("late", prompt_of(3, seed=9), 2)
    while driver.scheduler.has_unfinished_requests():
        before = driver.scheduler.ledger.num_preemptions
        step = driver.step()
        if driver.scheduler.ledger.num_preemptions > before:
            assert step.new_requests == []
    driver.assert_solo()


def test_case_09_look_ups_are_counted_once_while_waiting():
    driver = Driver(num_blocks=17)
    prefix = prompt_of(2 * B)
    driver.generate("warm", prefix + [1])
    driver.add("hog", prompt_of(12 * B, seed=1), 12)
    driver.step()
    ledger = driver.scheduler.ledger
    asked, found = ledger.blocks_asked, ledger.blocks_found
    driver.add("waits", prefix + prompt_of(3 * B, seed=2), 2)
    waited = 0
    while driver.scheduler.num_waiting:
        driver.step()
        waited += driver.scheduler.num_waiting
        expected = (0, 0) if driver.scheduler.num_waiting else (4, 2)
        assert (ledger.blocks_asked - asked, ledger.blocks_found - found) == expected
    assert waited > 5
    driver.run().assert_solo()


def test_case_10_a_chunk_is_not_a_hit():
    driver = Driver(max_num_batched_tokens=8)
    driver.add("cold", prompt_of(80))
    chunks = []
    while driver.scheduler.has_unfinished_requests():
        step = driver.step()
        chunks.append(step.num_prefill_tokens)
        assert driver.requests["cold"].num_cached_tokens == 0
    assert chunks == [8] * 10 + [0] * 3
    ledger = driver.scheduler.ledger
    assert (ledger.computed_tokens, ledger.cached_tokens) == (80, 0)
    assert (ledger.blocks_asked, ledger.blocks_found) == (19, 0)
    driver.assert_solo()


@pytest.mark.parametrize("chunk", [1, 7, 24, 100])
def test_case_11_chunk_boundary_inside_a_block(chunk):
    driver = Driver(block_size=16, max_num_batched_tokens=chunk)
    driver.add("a", prompt_of(100), 8)
    while driver.scheduler.has_unfinished_requests():
        driver.step()
        request = driver.requests["a"]
        pool = driver.scheduler.kv.pool.blocks
        entries = [pool[i].entry for i in request.block_ids]
        published = [entry is not None and not entry.is_tail for entry in entries]
        full = request.num_computed_tokens // 16
        assert published == [i < full for i in range(len(published))]
    driver.check_idle()
    driver.assert_solo()


def test_case_13_never_fits_is_refused_with_both_numbers():
    driver = Driver(num_blocks=8)
    with pytest.raises(RequestTooLongError, match=r"= 35 tokens, .* holds 32"):
        driver.add("output", prompt_of(10), 25)
    with pytest.raises(RequestTooLongError, match=r"= 41 tokens, .* holds 32"):
        driver.add("prompt", prompt_of(40), None)
    with pytest.raises(RequestTooLongError, match=r"4096 tokens, but max_model_len=4096"):
        driver.add("long", prompt_of(4096), 1)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        driver.add("empty", [])
    driver.add("fits", prompt_of(10), 22)
    driver.run().assert_solo("fits")


def test_case_13_output_that_outgrows_the_pool_ends_with_a_reason():
    driver = Driver(num_blocks=8)
    request = driver.generate("open", prompt_of(10), None)
    assert request.finish_reason is FinishReason.LENGTH
    assert request.stop_reason == KV_CACHE_FULL
    assert request.num_output_tokens == 32 - 10 + 1  # the last token needs no KV
    assert driver.tokens["open"] == solo(prompt_of(10), 23)
    driver.generate("next", prompt_of(10), 2)


def test_case_13_two_open_ended_requests_do_not_block_each_other():
    driver = Driver(num_blocks=8)
    driver.add("a", prompt_of(10), None)
    driver.add("b", prompt_of(10, seed=1), None)
    driver.run()
    assert [len(t) for t in driver.tokens.values()] == [23, 23]


def test_live_id_and_bad_tokens_are_refused():
    driver = Driver()
    driver.add("a", prompt_of(5))
    with pytest.raises(InvalidRequestError, match="unfinished"):
        driver.scheduler.add_request(make_request("a", prompt_of(5)))
    for bad in (2**32, -1, "x"):
        for place in (3, 4):  # in a full block, and in the tail that is hashed later
            with pytest.raises(InvalidRequestError, match="token ids"):
                driver.add("bad", [1, 2, 3, 4, 5][:place] + [bad])  # type: ignore[list-item]
    driver.run().assert_solo("a")
    driver.generate("a", prompt_of(6))  # a finished request's id may be used again


def _abort_at(driver: Driver, moment: str) -> None:
    if moment != "waiting":
        for _ in range({"mid_chunk": 2, "in_flight": 2, "decoding": 5}.get(moment, 0)):
            driver.step()
    planned = driver.scheduler.schedule() if moment == "in_flight" else None
    driver.abort("x")
    driver.abort("x")  # twice is once
    driver.abort("nobody")
    if planned is not None:
        driver.update(planned)


@pytest.mark.parametrize("moment", ["waiting", "mid_chunk", "in_flight", "decoding"])
def test_case_14_abort_everywhere(moment):
    driver = Driver(max_num_batched_tokens=8)
    driver.add("x", prompt_of(22), 9)
    driver.add("same", prompt_of(22), 9)
    driver.add("other", prompt_of(9, seed=1), 9)
    _abort_at(driver, moment)
    assert driver.finished["x"].finish_reason is FinishReason.ABORT
    emitted = len(driver.tokens["x"])
    driver.run()
    assert len(driver.tokens["x"]) == emitted
    driver.assert_solo("same", "other")
    assert driver.tokens["x"] == solo(prompt_of(22), 9)[:emitted]
    ledger = driver.scheduler.ledger
    assert ledger.prompt_tokens == (31 if moment == "waiting" else 53)
    assert ledger.dropped_tokens == {"mid_chunk": 6}.get(moment, 0)


def test_case_14_abort_in_the_last_step_emits_no_token():
    driver = Driver()
    driver.add("x", prompt_of(6), 2)
    driver.step()
    planned = driver.scheduler.schedule()
    driver.abort("x")
    driver.update(planned)
    assert driver.tokens["x"] == solo(prompt_of(6), 1)
    assert driver.finished["x"].finish_reason is FinishReason.ABORT
    driver.run()


def test_case_14_abort_while_preempted():
    driver = _preempting_driver()
    while not any(r.num_preemptions for r in driver.requests.values()):
        driver.step()
    victim = next(n for n, r in driver.requests.items() if r.num_preemptions)
    driver.abort(victim)
    driver.run()
    driver.assert_solo(*(n for n in driver.requests if n != victim))
    assert driver.finished[victim].finish_reason is FinishReason.ABORT


def test_case_14_id_used_again_while_the_aborted_step_is_in_flight():
    driver = Driver()
    driver.add("x", prompt_of(9), 9)
    driver.step()
    planned = driver.scheduler.schedule()
    driver.abort("x")
    driver.add("x", prompt_of(13, seed=1), 3)
    driver.update(planned)
    driver.run().assert_solo()


def test_case_14_abort_of_the_provider_in_flight_keeps_the_sharer_right():
    driver = Driver()
    driver.add("a", prompt_of(5 * B + 3))
    driver.add("b", prompt_of(5 * B + 3))
    planned = driver.scheduler.schedule()
    driver.abort("a")
    driver.update(planned)
    driver.run().assert_solo("b")
    assert driver.requests["b"].num_preemptions == 0


@pytest.mark.parametrize("before_forward", [True, False])
def test_error_in_a_step_recomputes_those_who_shared_its_blocks(before_forward):
    """A's blocks were published when scheduled; its KV was never computed."""
    driver = Driver()
    driver.runner.fail_before_forward = before_forward
    driver.add("a", prompt_of(5 * B + 3))
    driver.add("b", prompt_of(5 * B) + prompt_of(B + 1, seed=1))
    driver.add("c", prompt_of(5 * B) + prompt_of(B + 1, seed=1))  # through b, which is tainted
    driver.add("d", prompt_of(5 * B, seed=2))
    driver.runner.fail["a"] = "boom"
    driver.step()
    assert driver.finished["a"].finish_reason is FinishReason.ERROR
    assert driver.finished["a"].error == "boom"
    assert driver.tokens["a"] == driver.tokens["b"] == driver.tokens["c"] == []
    driver.add("later", prompt_of(5 * B + 1))
    driver.run().assert_solo("b", "c", "d", "later")
    assert [driver.requests[i].num_preemptions for i in "bcd"] == [1, 1, 0]
    assert all(GARBAGE not in tokens for tokens in driver.tokens.values())


def test_late_error_takes_back_nothing_of_earlier_steps():
    driver = Driver()
    driver.add("a", prompt_of(5 * B + 3), 9)
    driver.add("b", prompt_of(5 * B + 3), 9)
    driver.step()
    driver.runner.fail["a"] = "boom"
    driver.step()
    driver.run().assert_solo("b")
    assert driver.requests["b"].num_preemptions == 0
    # b's half-filled block, too: it was computed in the step before
    assert driver.generate("c", prompt_of(5 * B + 3)).num_cached_tokens == 5 * B + 2


def test_error_of_a_request_aborted_in_flight_still_unpublishes():
    driver = Driver()
    driver.add("a", prompt_of(5 * B + 3))
    planned = driver.scheduler.schedule()
    driver.abort("a")
    driver.runner.fail["a"] = "boom"
    driver.update(planned)
    assert driver.generate("b", prompt_of(5 * B + 3)).num_cached_tokens == 0
    driver.assert_solo("b")


def test_whole_step_failed_ends_all_and_the_scheduler_goes_on():
    driver = Driver()
    for name in "ab":
        driver.add(name, prompt_of(9), 5)
        driver.runner.fail[name] = "out of memory"
    driver.step()
    assert [o.finish_reason for o in driver.finished.values()] == [FinishReason.ERROR] * 2
    assert driver.generate("c", prompt_of(9)).num_cached_tokens == 0
    driver.assert_solo("c")


def test_missing_sample_is_an_error_not_a_hang():
    driver = Driver()
    driver.add("a", prompt_of(9))
    planned = driver.scheduler.schedule()
    result = driver.runner.execute(planned)
    result.sampled.clear()
    (output,) = driver.scheduler.update_from_output(planned, result)
    assert output.finish_reason is FinishReason.ERROR
    assert "no token" in str(output.error)
    assert not driver.scheduler.has_unfinished_requests()


def test_case_15_decode_is_not_starved_by_a_long_prompt():
    chunk = 8
    driver = Driver(max_num_batched_tokens=chunk, num_blocks=256)
    driver.add("stream", prompt_of(5), 80)
    driver.step()
    driver.add("long", prompt_of(64 * chunk, seed=1), 1)
    while "long" not in driver.finished:
        before = len(driver.tokens["stream"])
        step = driver.step()
        assert len(driver.tokens["stream"]) == before + 1  # a token in every step
        assert step.total_num_scheduled_tokens <= chunk
    driver.run().assert_solo()


def test_prefill_is_not_starved_by_decodes():
    """A budget of n tokens admits at most n requests, so each advances in each step."""
    driver = Driver(max_num_batched_tokens=3, num_blocks=64)
    for index in range(6):
        driver.add(f"{index}", prompt_of(5, seed=index), 20)
    while driver.scheduler.has_unfinished_requests():
        computed = {n: r.num_computed_tokens for n, r in driver.requests.items()}
        decoding = [n for n, r in driver.requests.items() if driver.tokens[n] and not r.is_finished]
        step = driver.step()
        assert all(n in step.num_scheduled_tokens for n in decoding)
        assert driver.scheduler.num_running <= 3
        oldest = min((n for n in computed if n not in driver.finished), default=None)
        if oldest is not None:
            assert driver.requests[oldest].num_computed_tokens > computed[oldest]
    driver.assert_solo()


def test_first_come_first_served():
    driver = Driver(max_num_seqs=2)
    for index in range(8):
        driver.add(f"{index}", prompt_of(5, seed=index), 5)
    driver.run().assert_solo()
    assert list(driver.finished) == [str(i) for i in range(8)]


def test_without_chunked_prefill_prompts_run_whole():
    driver = Driver(enable_chunked_prefill=False, max_num_batched_tokens=32, max_model_len=32)
    for index in range(5):
        driver.add(f"{index}", prompt_of(20, seed=index), 6)
    while driver.scheduler.has_unfinished_requests():
        step = driver.step()
        assert step.num_prefill_tokens in (0, 20)
    driver.assert_solo()


@pytest.mark.parametrize("chunked", [True, False])
def test_preemption_in_mid_prefill_balances(chunked):
    """Decodes outgrow the watermark while a long prompt is still being computed."""
    settings = {"max_num_batched_tokens": 6} if chunked else {"enable_chunked_prefill": False}
    driver = Driver(num_blocks=24, max_model_len=64, **settings)
    for index in range(3):
        driver.add(f"{index}", prompt_of(6, seed=index), 26)
    driver.add("long", prompt_of(58, seed=7), 3)
    driver.add("same", prompt_of(58, seed=7), 3)
    driver.run().assert_solo()
    ledger = driver.scheduler.ledger
    assert ledger.computed_tokens + ledger.cached_tokens == ledger.prompt_tokens == 134
    assert ledger.cached_tokens == sum(r.num_cached_tokens for r in driver.requests.values())


def test_num_cached_tokens_is_in_every_output():
    driver = Driver()
    driver.generate("a", prompt_of(9), 2)
    driver.add("b", prompt_of(9), 2)
    planned = driver.scheduler.schedule()
    (output,) = driver.scheduler.update_from_output(planned, driver.runner.execute(planned))
    assert output.num_cached_tokens == 8
    assert output.finish_reason is None
