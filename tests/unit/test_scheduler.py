"""The scheduler's single decisions: messages, stop rules, settings, queue order."""

from dataclasses import replace

import pytest

from tests.engine.fake import Driver, make_config, make_request
from tiny_vllm.core.queue import WaitingQueue
from tiny_vllm.core.scheduler import Scheduler
from tiny_vllm.core.stop import KV_CACHE_FULL, Stop, check_stop
from tiny_vllm.errors import ConfigError
from tiny_vllm.outputs import FinishReason
from tiny_vllm.protocol import CachedRequestData, ModelRunnerOutput, SampledToken
from tiny_vllm.request import RequestId, RequestStatus


def stop_after(output: list[int], max_tokens: int = 9, **fields) -> Stop | None:
    request = make_request("a", [1, 2, 3], max_tokens, **fields)
    request.token_ids += output
    return check_stop(request, max_model_len=10, capacity=8)


def test_stop_rules():
    eos = {"eos_token_ids": frozenset({7})}
    assert stop_after([5]) is None
    assert stop_after([7], **eos) == (FinishReason.STOP, None)
    assert stop_after([7], ignore_eos=True, **eos) is None
    assert stop_after([7], stop_token_ids=[7]) == (FinishReason.STOP, 7)
    assert stop_after([7], stop_token_ids=[7], ignore_eos=True, **eos) == (FinishReason.STOP, 7)
    assert stop_after([7], min_tokens=2, **eos) is None
    assert stop_after([5, 7], min_tokens=2, **eos) == (FinishReason.STOP, None)
    assert stop_after([5, 5], 2) == (FinishReason.LENGTH, None)
    assert stop_after([5, 7], 2, **eos) == (FinishReason.STOP, None)
    assert stop_after([5] * 5) is None
    assert stop_after([5] * 6) == (FinishReason.LENGTH, KV_CACHE_FULL)
    assert stop_after([5] * 7) == (FinishReason.LENGTH, None)  # max_model_len


def test_queue_is_first_come_first_served_with_preempted_ones_in_front():
    queue = WaitingQueue()
    requests = {name: make_request(name, [1]) for name in "abc"}
    for request in requests.values():
        queue.add(request)
    queue.remove(RequestId("b"))
    queue.add_front(requests["b"])
    order = []
    while queue:
        (first,) = queue.candidates(1)
        order.append(first.request_id)
        queue.remove(first.request_id)
    assert order == ["b", "a", "c"]


@pytest.mark.parametrize(
    "name", ["block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len"]
)
def test_unresolved_config_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name}=None"):
        Scheduler(make_config(**{name: None}))


def test_budget_below_the_context_needs_chunks():
    with pytest.raises(ConfigError, match=r"=64 is below max_model_len=4096"):
        Scheduler(make_config(enable_chunked_prefill=False))


def test_messages_of_a_request_s_life():
    driver = Driver(max_num_batched_tokens=6)
    driver.add("a", list(range(10)), 3)
    first = driver.step()
    (new,) = first.new_requests
    assert new.token_ids == list(range(10))
    assert (new.block_ids, new.num_computed_tokens, new.num_prompt_tokens) == ([0, 1], 0, 10)
    assert (first.num_prefill_tokens, first.num_decode_tokens, first.step) == (6, 0, 1)
    assert driver.tokens["a"] == []
    second = driver.step()
    assert second.cached_requests == [CachedRequestData(RequestId("a"), [2], 6)]
    third = driver.step()
    assert (third.num_prefill_tokens, third.num_decode_tokens) == (0, 1)
    driver.step()
    assert driver.finished["a"].finish_reason is FinishReason.LENGTH
    last = driver.scheduler.schedule()
    assert last.removed_request_ids == ["a"]
    assert last.total_num_scheduled_tokens == 0


def test_decodes_come_first_then_prefills_then_new_ones():
    driver = Driver(max_num_batched_tokens=12)
    driver.add("p", list(range(30)), 1)
    driver.step()
    driver.add("d", [5, 6], 9)
    driver.step()
    driver.step()  # the rest of p, and d
    driver.add("q", list(range(40, 60)), 1)
    driver.step()
    driver.add("n", [8], 1)
    assert list(driver.step().num_scheduled_tokens.items()) == [("d", 1), ("q", 9), ("n", 1)]


def test_last_token_of_a_prompt_is_prefill_even_if_alone():
    driver = Driver(max_num_batched_tokens=6)
    driver.add("a", list(range(7)), 2)
    steps = [driver.step() for _ in range(3)]
    counts = [(step.num_prefill_tokens, step.num_decode_tokens) for step in steps]
    assert counts == [(6, 0), (1, 0), (0, 1)]


def test_resumed_request_comes_back_whole():
    driver = Driver(num_blocks=7)
    driver.add("a", list(range(8)), 16)
    driver.add("b", list(range(50, 58)), 16)
    seen = []
    while driver.scheduler.has_unfinished_requests():
        step = driver.step()
        for new in step.new_requests:
            seen.append((new.request_id, len(new.token_ids), new.num_prompt_tokens))
    assert seen[:2] == [("a", 8, 8), ("b", 8, 8)]
    name, length, num_prompt = seen[2]
    assert (name, num_prompt) == ("b", 8)
    assert length > 8
    driver.assert_solo()


def test_preempted_request_is_removed_in_the_same_output():
    driver = Driver(num_blocks=7)
    driver.add("a", list(range(8)), 16)
    driver.add("b", list(range(50, 58)), 16)
    step = driver.step()
    while not driver.requests["b"].num_preemptions:
        step = driver.step()
    assert step.removed_request_ids == ["b"]
    assert driver.requests["b"].status is RequestStatus.PREEMPTED


def test_admission_leaves_room_for_running_prefills():
    """Two prompts of 9 blocks do not both enter a pool of 12, although the first has 2 yet."""
    driver = Driver(num_blocks=12, max_num_batched_tokens=8)
    driver.add("a", list(range(36)), 2)
    driver.add("b", list(range(100, 136)), 2)
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (1, 1)
    driver.run()
    assert driver.scheduler.ledger.num_preemptions == 0


@pytest.mark.parametrize("num_blocks, admitted", [(6, 1), (7, 2)])
def test_admission_leaves_a_spare_block_for_decodes(num_blocks, admitted):
    driver = Driver(num_blocks=num_blocks)
    driver.add("a", list(range(8)), 2)
    driver.add("b", list(range(50, 66)), 2)
    driver.step()
    assert driver.scheduler.num_running == admitted
    driver.run().assert_solo()


def test_request_alone_may_take_the_whole_pool():
    driver = Driver(num_blocks=3)
    driver.generate("a", list(range(11)), 1)
    driver.assert_solo()


def test_finish_request_by_stop_string():
    driver = Driver()
    driver.add("a", [1, 2, 3], 9)
    driver.step()
    output = driver.scheduler.finish_request(RequestId("a"), FinishReason.STOP, "END")
    assert output is not None
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "END")
    assert output.metrics is not None
    assert output.metrics.finished_time is not None
    assert driver.scheduler.finish_request(RequestId("a"), FinishReason.ABORT) is None
    assert driver.scheduler.blocks_used == 0


def test_logprobs_are_passed_on():
    scheduler = Scheduler(make_config())
    scheduler.add_request(make_request("a", [1, 2]))
    planned = scheduler.schedule()
    result = ModelRunnerOutput(num_forward_tokens=2)
    result.sampled[RequestId("a")] = SampledToken(5, {})
    result.prompt_logprobs[RequestId("a")] = [None, {}]
    (output,) = scheduler.update_from_output(planned, result)
    assert (output.logprobs, output.prompt_logprobs) == ([{}], [None, {}])
    assert output.new_token_ids == [5]


def test_schedule_twice_without_update_is_an_internal_error():
    driver = Driver()
    driver.add("a", [1, 2])
    planned = driver.scheduler.schedule()
    with pytest.raises(AssertionError, match="before update"):
        driver.scheduler.schedule()
    planned = replace(planned, num_scheduled_tokens={RequestId("z"): 1})
    with pytest.raises(AssertionError, match="another step"):
        driver.scheduler.update_from_output(planned, ModelRunnerOutput())


def test_invariants_notice_a_leaked_block():
    driver = Driver()
    driver.add("a", list(range(9)), 9)
    driver.step()
    driver.requests["a"].block_ids.pop()
    with pytest.raises(AssertionError):
        driver.scheduler.check_invariants()
