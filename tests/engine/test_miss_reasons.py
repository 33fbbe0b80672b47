"""Real scheduler, fake model: every prompt token is found or has a reason."""

import random

import pytest

from tests.engine.fake import Driver
from tests.engine.test_prefix_sharing import prompt_of
from tiny_vllm.cache_report import CacheRange, CacheReport, MissReason
from tiny_vllm.request import Request

B = 4


def pieces(request: Request) -> list[tuple[int, int, str]]:
    report = request.cache_report
    assert report is not None
    return [(r.start, r.end, "hit" if r.reason is None else r.reason.value) for r in report.ranges]


def detail(request: Request, index: int) -> dict[str, object]:
    assert request.cache_report is not None
    return dict(request.cache_report.ranges[index].detail)


def test_cold_then_hit_but_for_the_last_token():
    driver = Driver()
    assert pieces(driver.generate("cold", prompt_of(11))) == [(0, 11, "cold")]
    warm = driver.generate("warm", prompt_of(11))
    assert pieces(warm) == [(0, 10, "hit"), (10, 11, "last_token")]
    assert warm.cache_report.copied_tokens == 2
    assert driver.finished["warm"].cache_report is warm.cache_report


def test_a_prompt_of_one_token_is_its_last_token():
    assert pieces(Driver().generate("a", [5])) == [(0, 1, "last_token")]


@pytest.mark.parametrize("at", [1, B - 1, B, B + 2, 2 * B])
def test_diverged_names_the_token_both_ids_and_the_earlier_request(at):
    driver = Driver()
    first = driver.generate("first", prompt_of(3 * B), 1)
    prompt = [*prompt_of(at), 5555, *prompt_of(6, seed=1)]
    second = driver.generate("second", prompt, 1)
    assert pieces(second) == [(0, at, "hit"), (at, at + 7, "diverged")]
    assert detail(second, 1) == {
        "here_token": 5555,
        "there_token": first.prompt_token_ids[at],
        "request_id": "first",
    }


def test_nothing_in_common_is_cold_not_diverged():
    driver = Driver()
    driver.generate("first", prompt_of(9))
    assert pieces(driver.generate("second", prompt_of(9, seed=1))) == [(0, 9, "cold")]


def test_text_that_goes_on_where_nobody_went_on_is_cold():
    driver = Driver()
    first = driver.generate("first", prompt_of(2 * B), 3)
    end = len(first.token_ids) - 1  # the last token was never fed back
    second = driver.generate("second", [*first.token_ids, 1, 2, 3])
    assert pieces(second) == [(0, end, "hit"), (end, end + 4, "cold")]


@pytest.mark.parametrize("at", [1, B - 1, B + 2])
def test_case_21_below_block_without_partial_reuse(at):
    driver = Driver(enable_partial_block_reuse=False)
    driver.generate("first", prompt_of(3 * B), 1)
    second = driver.generate("second", [*prompt_of(at), 5555, 1, 2], 1)
    full = at // B * B
    expected = [(full, at, "below_block"), (at, at + 3, "diverged")]
    assert pieces(second) == [(0, full, "hit")] * bool(full) + expected
    index = bool(full)
    assert detail(second, index) == {
        "common_tokens": at % B,
        "block_size": B,
        "request_id": "first",
    }
    assert f"below a block ({at % B} of {B} as in request first)" in str(second.cache_report)


def test_evicted_knows_when_for_whom_and_under_what_pressure():
    driver = Driver(num_blocks=6)
    driver.generate("old", prompt_of(5 * B), 1)
    driver.generate("new", prompt_of(3 * B, seed=1), 1)
    again = driver.generate("again", [*prompt_of(5 * B), 7], 1)
    assert pieces(again) == [(0, 12, "hit"), (12, 20, "evicted"), (20, 21, "last_token")]
    facts = detail(again, 1)
    assert (facts["request_id"], facts["blocks_total"]) == ("new", 6)
    assert 0 < facts["step"] < driver.scheduler.schedule().step
    assert facts["seconds_ago"] > 0
    assert f"for request new while requests held {facts['blocks_used']} of 6 blocks" in str(
        again.cache_report
    )


def test_a_block_evicted_while_a_twin_is_cached_is_not_remembered():
    driver = Driver(num_blocks=8)
    driver.generate("a", prompt_of(2 * B), 1)
    driver.generate("twin", prompt_of(2 * B), 1, use_prefix_cache=False)
    driver.generate("filler", prompt_of(5 * B, seed=1), 1)
    assert len(driver.scheduler.kv.evictions) <= 2
    again = driver.generate("again", prompt_of(2 * B), 1)
    assert sum(r.num_tokens for r in again.cache_report.ranges) == 2 * B


@pytest.mark.parametrize("key", [{"cache_salt": "s"}, {"adapter": "s"}, {}])
def test_case_16_what_another_salt_or_adapter_holds_has_the_reason_salt(key):
    driver = Driver()
    driver.generate("first", prompt_of(2 * B + 2), cache_salt="secret")
    second = driver.generate("second", prompt_of(2 * B + 2), **key)
    assert pieces(second) == [(0, 2 * B, "salt"), (2 * B, 2 * B + 2, "cold")]
    assert second.num_cached_tokens == 0
    assert "secret" not in str(second.cache_report)


def test_disabled_says_what_disabled_it():
    off = Driver(enable_prefix_caching=False).generate("a", prompt_of(9))
    assert pieces(off) == [(0, 9, "disabled")]
    assert "enable_prefix_caching=False" in str(off.cache_report)
    bypass = Driver().generate("a", prompt_of(9), use_prefix_cache=False)
    assert pieces(bypass) == [(0, 9, "disabled")]
    assert "bypasses" in str(bypass.cache_report)


def test_pending_when_another_request_computes_it_in_the_same_step():
    driver = Driver()
    driver.add("a", [*prompt_of(2 * B + 2), 1, 2])
    driver.add("b", [*prompt_of(2 * B + 2), 3, 4])
    driver.run().assert_solo()
    report = pieces(driver.requests["b"])
    assert report == [(0, 8, "hit"), (8, 10, "pending"), (10, 12, "diverged")]
    assert detail(driver.requests["b"], 1) == {"request_id": "a"}


def test_a_resumed_request_keeps_the_report_of_its_first_look_up():
    driver = Driver(num_blocks=14)
    for name in "abcd":
        driver.add(name, prompt_of(2 * B, seed=ord(name)), 30)
    driver.run().assert_solo()
    assert driver.scheduler.ledger.num_preemptions > 0
    assert [pieces(r) for r in driver.requests.values()] == [[(0, 8, "cold")]] * 4


def test_reset_forgets_evictions_too():
    driver = Driver(num_blocks=5)
    driver.generate("a", prompt_of(4 * B), 1)
    driver.generate("b", prompt_of(4 * B, seed=1), 1)
    assert len(driver.scheduler.kv.evictions) > 0
    assert driver.scheduler.reset_prefix_cache()
    assert pieces(driver.generate("c", prompt_of(4 * B), 1)) == [(0, 16, "cold")]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_prompts_are_covered_without_gap_and_the_ledger_balances(seed, partial):
    rng = random.Random(seed)
    driver = Driver(num_blocks=40, max_num_batched_tokens=24, enable_partial_block_reuse=partial)
    for index in range(60):
        prompt = prompt_of(rng.randrange(1, 30), seed=rng.randrange(3))
        prompt += prompt_of(rng.randrange(1, 8), seed=rng.randrange(100))
        salt = rng.choice([None, None, "s"])
        driver.add(f"{index}", prompt, rng.randrange(1, 9), cache_salt=salt)
        for _ in range(rng.randrange(3)):
            driver.step()
    driver.run().assert_solo()
    ledger = driver.scheduler.ledger
    for request in driver.requests.values():
        ranges = request.cache_report.ranges
        assert ranges[0].start == 0 and ranges[-1].end == request.num_prompt_tokens
        assert all(a.end == b.start for a, b in zip(ranges, ranges[1:], strict=False))
        assert all(r.num_tokens > 0 for r in ranges)
        assert all(r.reason is not None for r in ranges[1:])
        again = CacheReport.from_dict(request.cache_report.to_dict())
        assert again == request.cache_report and str(again) == str(request.cache_report)
    reports = [r.cache_report for r in driver.requests.values()]
    for reason in MissReason:
        total = sum(report.missed_tokens().get(reason, 0) for report in reports)
        assert ledger.missed()[reason] == total
    found = sum(report.cached_tokens for report in reports)
    assert found == ledger.cached_tokens - ledger.cached_tokens_late
    assert found > 100
    assert ledger.missed()[MissReason.EVICTED] > 0


def test_sentence_with_the_texts_of_the_tokens():
    diverged = CacheRange(
        1536,
        1600,
        MissReason.DIVERGED,
        {"here_token": 7, "there_token": 8, "request_id": "41"},
    )
    report = CacheReport((CacheRange(0, 1536), diverged))
    texts = {7: " Berlin", 8: " Paris"}
    assert str(report.with_text(texts.__getitem__)) == (
        "tokens 0-1535 hit; diverged at token 1536: ' Berlin' here, ' Paris' in request 41; "
        "64 tokens computed"
    )
    assert "token id 7 here" in str(report)
