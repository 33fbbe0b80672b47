"""Outputs are built when they are read, and are what they were at their step."""

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest

from tests.engine.fake import make_request
from tests.unit.test_tokenizer_stream import SPECIAL_ID, TOKENIZER, ids_of
from tiny_vllm.engine.fan_out import RequestGroup
from tiny_vllm.engine.output_processor import OutputProcessor
from tiny_vllm.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from tiny_vllm.protocol import EngineCoreOutput
from tiny_vllm.request import RequestId
from tiny_vllm.sampling_params import SamplingParams

A = RequestId("a")
LENGTH = FinishReason.LENGTH
TEXT = "héllo 🎉!"  # characters of one, two and four bytes: the text lags behind the tokens


def steps(ids: list[int], with_logprobs: bool = False, end: FinishReason = LENGTH):
    """The core's outputs for one request: a token a step, the last one with a reason."""
    for i, token_id in enumerate(ids):
        output = EngineCoreOutput(A, [token_id], num_cached_tokens=2)
        if with_logprobs:
            output.logprobs = [{token_id: Logprob(-0.1 * (i + 1), 1), 0: Logprob(-9.0, 2)}]
        if i == len(ids) - 1:
            output.finish_reason = end
        yield output


def processor(tokenizer=TOKENIZER, **params) -> OutputProcessor:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request("a", [1, 2, 3], 99, **params), "abc")
    return processor


def run(outputs, read: bool, **kw) -> list[RequestOutput]:
    """All outputs of one request; ``read`` looks at each as soon as it is there."""
    followed, results = processor(**kw), []
    for output in outputs:
        (result,), _ = followed.process([output])
        if read:
            assert result.outputs
        results.append(result)
    return results


def content(output: RequestOutput) -> dict:
    """All of it but the request's times, which two runs do not share."""
    return dataclasses.asdict(dataclasses.replace(output, metrics=None))


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_read_late_is_read_at_once(tokenizer, with_logprobs):
    ids = ids_of(TEXT)
    at_once = run(steps(ids, with_logprobs), True, tokenizer=tokenizer)
    late = run(steps(ids, with_logprobs), False, tokenizer=tokenizer)
    assert [content(o) for o in reversed(late)] == [content(o) for o in reversed(at_once)]
    for i, output in enumerate(late, start=1):
        (completion,) = output.outputs
        assert completion.token_ids == ids[:i]
        assert completion.finish_reason is (LENGTH if i == len(ids) else None)
        assert output.finished == completion.finished
        if with_logprobs:
            assert [list(entry) for entry in completion.logprobs] == [[t, 0] for t in ids[:i]]
            assert completion.cumulative_logprob == pytest.approx(-0.05 * i * (i + 1))
        else:
            assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
        if tokenizer is not None:
            seen = bytes(ids[:i]).decode(errors="ignore")
            assert completion.text == seen


def test_the_text_is_that_of_the_step_while_a_stop_string_is_pending():
    outputs = run(steps(ids_of("ab EN")), False, stop=["END"])
    assert [o.outputs[0].text for o in outputs] == ["a", "ab", "ab ", "ab ", "ab EN"]


def test_read_twice_is_the_same_object_and_nobody_elses():
    first, second, last = run(steps([5, 6, 7]), False, tokenizer=None)
    assert first.outputs is first.outputs
    first.outputs[0].token_ids.append(99)
    last.outputs[0].token_ids.clear()
    assert (first.num_output_tokens, last.num_output_tokens) == (2, 0)
    assert second.outputs[0].token_ids == [5, 6]
    assert first.outputs[0].token_ids == [5, 99]


def test_written_before_it_is_read():
    first, _ = run(steps([5, 6]), False, tokenizer=None)
    first.outputs = [CompletionOutput(0, token_ids=[1, 2, 3])]
    assert first.outputs[0].token_ids == [1, 2, 3]


def test_streaming_reads_every_step():
    texts = [o.outputs[0].text for o in run(steps(ids_of(TEXT)), True)]
    assert texts[-1] == TEXT
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))


def test_counting_tokens_builds_nothing():
    first, last = run(steps([5, 6]), False, tokenizer=None)
    assert (first.num_output_tokens, last.num_output_tokens) == (1, 2)
    assert hasattr(first, "_at_step")
    assert first.outputs[0].token_ids == [5]
    assert first.num_output_tokens == 1
    assert not hasattr(first, "_at_step")
    plain = RequestOutput("a", None, [1], [CompletionOutput(i, "", [1, 2]) for i in range(3)])
    assert plain.num_output_tokens == 6


def unread_and_plain() -> tuple[RequestOutput, RequestOutput]:
    """The same output twice: not built yet, and made by hand."""
    first, _ = run(steps([5, 6]), False, tokenizer=None)
    completions = [CompletionOutput(0, token_ids=[5])]
    return first, RequestOutput(
        "a", "abc", [1, 2, 3], completions, num_cached_tokens=2, metrics=first.metrics
    )


@pytest.mark.parametrize("look", [copy.copy, copy.deepcopy, dataclasses.replace, repr])
def test_an_unread_output_looks_like_any(look):
    unread, plain = unread_and_plain()
    assert look(unread) == look(plain)
    assert unread == plain


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RequestOutput)])
def test_an_unread_output_has_all_fields(name):
    """`deferred` fills them by hand: a new one must not be forgotten."""
    unread, plain = unread_and_plain()
    assert getattr(unread, name) == getattr(plain, name)


def test_an_unread_output_can_be_pickled():
    unread, plain = unread_and_plain()
    assert pickle.loads(pickle.dumps(unread)) == plain


def test_a_misspelt_attribute_is_an_error():
    first, _ = run(steps([5, 6]), False, tokenizer=None)
    with pytest.raises(AttributeError, match="'RequestOutput' object has no attribute 'output'"):
        _ = first.output


def test_a_finished_or_read_output_keeps_nothing_alive():
    followed = processor()
    first, last = steps(ids_of("ab"))
    (unread,), _ = followed.process([first])
    alive = weakref.ref(followed._states[A].growing.detokenizer)
    (finished,), _ = followed.process([last])
    gc.collect()
    assert alive() is not None  # for the output that has not been read
    assert unread.outputs[0].text == "a"
    gc.collect()
    assert alive() is None
    assert finished.outputs[0].text == "ab"


def test_a_stop_string_ends_the_request_in_its_step():
    followed = processor(stop=["END"])
    outputs = list(steps(ids_of("ab END")))
    outputs[-1].finish_reason = None
    for output in outputs[:-1]:
        (before,), stops = followed.process([output])
        assert (stops, before.finished) == ([], False)
    (last,), (hit,) = followed.process(outputs[-1:])
    assert (hit.request_id, hit.stop) == ("a", "END")
    (completion,) = last.outputs
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, "END")
    assert (completion.text, last.finished) == ("ab ", True)
    assert len(completion.token_ids) == 6
    assert before.outputs[0].finish_reason is None
    assert followed.process([EngineCoreOutput(A, [], finish_reason=FinishReason.ABORT)]) == ([], [])


def test_the_token_that_ends_the_output_is_not_shown():
    ids = [*ids_of("ab"), SPECIAL_ID]
    last = run(steps(ids, end=FinishReason.STOP), False)[-1]
    assert (last.outputs[0].text, last.outputs[0].token_ids) == ("ab", ids)


def test_an_error_ends_the_request():
    followed = processor()
    output = EngineCoreOutput(A, [], finish_reason=FinishReason.ERROR, error="NaN")
    (last,), stops = followed.process([output])
    assert (last.finished, last.error, stops) == (True, "NaN", [])
    assert last.outputs == [CompletionOutput(0, finish_reason=FinishReason.ERROR)]


def test_prompt_logprobs_come_once_and_stay():
    first, second, third = steps([5, 6, 7])
    first.prompt_logprobs = [None, {2: Logprob(-1.0, 1)}]
    outputs = run([first, second, third], False, tokenizer=None)
    assert [o.prompt_logprobs for o in outputs] == [first.prompt_logprobs] * 3


def test_a_group_merges_outputs_it_has_not_built():
    group = RequestGroup("7", SamplingParams(n=2), None, [1])
    followed = OutputProcessor(None)
    for request_id, _ in group.children():
        followed.add(make_request(request_id, [1, 2]), None)
    zero, one = map(RequestId, group.request_ids)
    for output in followed.process([EngineCoreOutput(zero, [5]), EngineCoreOutput(one, [6])])[0]:
        group.take(output)
        assert hasattr(output, "_at_step")
    assert (group.num_tokens, group.finished, group.just_finished()) == (2, False, 0)
    merged = group.output()
    assert (merged.request_id, merged.finished) == ("7", False)
    assert merged.outputs == [
        CompletionOutput(0, token_ids=[5]),
        CompletionOutput(1, token_ids=[6]),
    ]
    for request_id, token_ids in ((zero, [8, 9]), (one, [])):
        (output,), _ = followed.process(
            [EngineCoreOutput(request_id, token_ids, finish_reason=LENGTH)]
        )
        group.take(output)
        assert group.just_finished() == 1
    assert (group.num_tokens, group.finished, group.just_finished()) == (4, True, 0)
    assert [c.token_ids for c in group.output().outputs] == [[5, 8, 9], [6]]
