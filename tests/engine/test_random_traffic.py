"""2500 random requests each through a pool that is too small: every answer as if alone."""

import random

import pytest

from tests.engine.fake import GARBAGE, Driver, solo
from tiny_vllm.outputs import FinishReason

EOS = 11
NUM_REQUESTS = 2500


def _add_random(driver: Driver, rng: random.Random, index: int) -> None:
    document = random.Random(rng.randrange(5)).choices(range(50), k=30)
    prompt = document[: rng.randrange(1, 30)] + rng.choices(range(50), k=rng.randrange(1, 12))
    driver.add(
        f"{index}",
        prompt,
        rng.choice([1, 2, 5, 20, 40]),
        eos_token_ids=frozenset({EOS}),
        ignore_eos=rng.random() < 0.7,
        use_prefix_cache=rng.random() < 0.9,
        cache_salt=rng.choice([None, None, "s"]),
    )


def _disturb(driver: Driver, rng: random.Random) -> None:
    live = [n for n in driver.requests if n not in driver.finished]
    if live and rng.random() < 0.06:
        driver.abort(rng.choice(live))
    if live and rng.random() < 0.03:
        driver.runner.fail[rng.choice(live)] = "injected"
    driver.runner.fail_before_forward = rng.random() < 0.5


def _check(driver: Driver) -> None:
    for name, request in driver.requests.items():
        eos = None if request.params.ignore_eos else EOS
        expected = solo(request.prompt_token_ids, request.max_tokens, eos)
        tokens = driver.tokens[name]
        assert GARBAGE not in tokens
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert tokens == expected, name
        else:
            assert tokens == expected[: len(tokens)], name


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 9, "max_num_seqs": 8, "schedule": "prefix"},
        {"max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 3, "num_blocks": 45},
        {"max_num_batched_tokens": 100, "enable_chunked_prefill": False, "max_model_len": 100},
        {"max_num_batched_tokens": 30, "enable_prefix_caching": False},
    ],
    ids=["small_budget", "odd_blocks", "whole_prompts", "cache_off"],
)
def test_random_traffic_equals_solo_runs(settings):
    rng = random.Random(str(settings))
    driver = Driver(**{"num_blocks": 34, **settings})
    added = 0
    while added < NUM_REQUESTS or driver.scheduler.has_unfinished_requests():
        while added < NUM_REQUESTS and driver.scheduler.num_waiting < 4 and rng.random() < 0.6:
            _add_random(driver, rng, added)
            added += 1
        planned = driver.scheduler.schedule()
        _disturb(driver, rng)  # between schedule and update, where it hurts most
        driver.update(planned)
    driver.check_idle()
    _check(driver)
    ledger = driver.scheduler.ledger
    assert ledger.num_preemptions > 20
    assert (ledger.cached_tokens > 500) == settings.get("enable_prefix_caching", True)
    reasons = {output.finish_reason for output in driver.finished.values()}
    assert reasons == set(FinishReason)
    assert len(driver.finished) == NUM_REQUESTS
