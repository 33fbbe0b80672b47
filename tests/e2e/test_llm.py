"""`LLM` on the small real model: text, streams, stops, log-probabilities, bad input."""

import subprocess
import sys
import textwrap

import pytest

from tiny_vllm import LLM, SamplingParams
from tiny_vllm.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError
from tiny_vllm.hub import resolve_model
from tiny_vllm.outputs import FinishReason

pytestmark = pytest.mark.real_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
FRANCE = "The capital of France is"
PARIS_CHAT = [{"role": "user", "content": "Name the capital of France in one word."}]


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", dtype="float32", debug_checks=True, max_model_len=1024)


@pytest.fixture(autouse=True)
def _nothing_is_left_running(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        assert not engine.has_unfinished_requests()
        engine.check_invariants()


def test_text_prompt(llm):
    (output,) = llm.generate(FRANCE, GREEDY)
    assert output.prompt == FRANCE
    assert output.outputs[0].text.startswith(" Paris")
    assert output.finished and output.outputs[0].finish_reason is FinishReason.LENGTH
    assert len(output.outputs[0].token_ids) == 12


def test_chat_prompt_and_its_end(llm):
    (output,) = llm.chat(PARIS_CHAT, GREEDY.replace(max_tokens=40))
    assert output.outputs[0].text and output.outputs[0].token_ids[-1] == 2  # <|im_end|>
    assert "<|im_end|>" not in output.outputs[0].text
    assert output.outputs[0].finish_reason is FinishReason.STOP


def test_token_prompt_equals_text_prompt(llm):
    ids = llm.tokenizer.encode(FRANCE)
    by_ids, by_text = llm.generate([ids, FRANCE], GREEDY)
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids


def test_vllms_prompt_dictionaries(llm):
    ids = llm.get_tokenizer().encode(FRANCE)
    forms = [{"prompt": FRANCE}, {"prompt_token_ids": ids}, FRANCE]
    forms.append({"prompt": FRANCE, "prompt_token_ids": ids})
    outputs = llm.generate(forms, GREEDY)
    assert [o.prompt for o in outputs] == [FRANCE, None, FRANCE, FRANCE]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    (alone,) = llm.generate({"prompt_token_ids": ids}, GREEDY)
    assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_a_path_and_the_end_of_a_block():
    """model=Path(...) used to be refused; `with LLM(...)` did not exist."""
    path = resolve_model("smollm2-135m").location
    with LLM(path, tokenizer=path, max_model_len=64) as llm:
        assert llm.get_tokenizer() is llm.tokenizer
        assert llm.generate(FRANCE, GREEDY.replace(max_tokens=1))[0].finished
    with pytest.raises(EngineDeadError):
        llm.generate(FRANCE, GREEDY)


def test_outputs_keep_the_callers_order(llm):
    prompts = [f"{word} is a word of" for word in ("one", "two", "three", "four", "five")]
    params = [GREEDY.replace(max_tokens=n) for n in (9, 1, 7, 3, 5)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 7, 3, 5]


def test_case_01_same_answer_hit_or_miss(llm):
    """A warm prompt is taken from the cache and answers as it did cold."""
    prompt = "The river runs past the mill, the church and the old school. " * 8 + "Then it"
    llm.reset_prefix_cache()
    (cold,) = llm.generate(prompt, GREEDY)
    (warm,) = llm.generate(prompt, GREEDY)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens > 60
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_case_16_salt_separates(llm):
    prompt = "All happy families are alike; every unhappy family is unhappy. " * 6
    llm.generate(prompt, GREEDY, cache_salt="a")
    (other,) = llm.generate(prompt, GREEDY, cache_salt="b")
    (same,) = llm.generate(prompt, GREEDY, cache_salt="a")
    assert other.num_cached_tokens == 0 and same.num_cached_tokens > 0


def test_stream_equals_generate(llm):
    (whole,) = llm.generate(FRANCE, GREEDY)
    parts = list(llm.stream(FRANCE, GREEDY))
    texts = [p.outputs[0].text for p in parts]
    assert len(parts) > 3 and parts[-1].finished
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
    assert texts[-1] == whole.outputs[0].text


def test_interleaved_streams(llm):
    first, second = llm.stream(FRANCE, GREEDY), llm.stream("Two and two make", GREEDY)
    alternating = [next(first), next(second)]
    rest_first, rest_second = list(first), list(second)
    assert rest_first[-1].finished and rest_second[-1].finished
    assert rest_first[-1].request_id != rest_second[-1].request_id
    assert alternating[0].request_id == rest_first[-1].request_id


def test_closing_a_stream_aborts_it(llm):
    stream = llm.stream(FRANCE, GREEDY.replace(max_tokens=500))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests()


def test_a_stream_that_never_started_leaves_nothing(llm):
    """A generator's cleanup would not run before the first next()."""
    llm.stream(FRANCE, GREEDY).close()
    assert not llm.engine.has_unfinished_requests()
    llm.stream(FRANCE, GREEDY)  # dropped at once
    assert not llm.engine.has_unfinished_requests()


def test_n_completions(llm):
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8)
    (output,) = llm.generate(FRANCE, params)
    (again,) = llm.generate(FRANCE, params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in again.outputs]


def test_seed_does_not_depend_on_the_batch(llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=8)
    (alone,) = llm.generate(FRANCE, params)
    batch = llm.generate(["One", FRANCE, "Three little"], params)
    assert batch[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_case_18_stop_string_across_tokens(llm):
    (free,) = llm.generate(FRANCE, GREEDY)
    text = free.outputs[0].text
    stop = text[3:9]
    parts = list(llm.stream(FRANCE, GREEDY.replace(stop=stop)))
    done = parts[-1].outputs[0]
    assert done.text == text[: text.index(stop)]
    assert done.finish_reason is FinishReason.STOP and done.stop_reason == stop
    assert len(done.token_ids) < len(free.outputs[0].token_ids)
    assert all(done.text.startswith(p.outputs[0].text) for p in parts)


def test_case_18_stop_string_equal_to_the_first_token(llm):
    (output,) = llm.generate(FRANCE, GREEDY.replace(stop=[" Paris"]))
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 1


def test_stop_token_id(llm):
    (free,) = llm.generate(FRANCE, GREEDY)
    stop_id = free.outputs[0].token_ids[2]
    (output,) = llm.generate(FRANCE, GREEDY.replace(stop_token_ids=[stop_id]))
    assert output.outputs[0].stop_reason == stop_id
    assert output.outputs[0].finish_reason is FinishReason.STOP


def test_case_03_one_token(llm):
    """max_tokens = 1 on a miss and on a hit (case 3)."""
    prompt = "A long enough sentence to fill more than one block of the cache. " * 4
    llm.reset_prefix_cache()
    for _ in range(2):
        (output,) = llm.generate(prompt, GREEDY.replace(max_tokens=1))
        assert len(output.outputs[0].token_ids) == 1
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_max_tokens_none_runs_to_the_context_limit():
    llm = LLM("smollm2-135m", max_model_len=48)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate(FRANCE, params)
    done = output.outputs[0]
    assert len(output.prompt_token_ids) + len(done.token_ids) == 48
    assert done.finish_reason is FinishReason.LENGTH


def test_logprobs(llm):
    (output,) = llm.generate(FRANCE, GREEDY.replace(logprobs=3, max_tokens=4))
    entries = output.outputs[0].logprobs
    assert len(entries) == 4
    for token_id, entry in zip(output.outputs[0].token_ids, entries, strict=True):
        assert entry[token_id].rank == 1 and len(entry) == 3
        assert all(p.logprob <= 0 for p in entry.values())
    assert entries[0][output.outputs[0].token_ids[0]].decoded_token == " Paris"
    total = sum(e[t].logprob for t, e in zip(output.outputs[0].token_ids, entries, strict=True))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_case_02_prompt_logprobs_cold_and_warm(llm):
    """Case 2: n entries, the first null, the same after the prompt is cached."""
    prompt = "Sphinx of black quartz, judge my vow. " * 20
    params = GREEDY.replace(prompt_logprobs=1, max_tokens=1)
    llm.reset_prefix_cache()
    runs = [llm.generate(prompt, params)[0] for _ in range(2)]
    for run in runs:
        assert len(run.prompt_logprobs) == len(run.prompt_token_ids)
        assert run.prompt_logprobs[0] is None
        for token_id, entry in zip(run.prompt_token_ids[1:], run.prompt_logprobs[1:], strict=True):
            assert token_id in entry
    first, second = ([e and dict(e) for e in run.prompt_logprobs] for run in runs)
    assert first == second


def test_a_refused_prompt_disturbs_nothing(llm):
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.generate([FRANCE, ""], GREEDY)
    assert not llm.engine.has_unfinished_requests()
    assert llm.generate(FRANCE, GREEDY)[0].finished


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2, 49152], "49152"),
        ([1, -5], "-5"),
        (list(range(1000)) * 2, "1024"),
        ([], "prompts must|empty|no tokens"),
        (b"abc", "a prompt is text"),
        ({"a": 1}, r"messages\[0\]|prompt"),
        ({"prompt": "a", "multi_modal_data": 1}, "got 'multi_modal_data'"),
        ({"prompt": 5}, "prompt must be text, got 5"),
        ({"prompt": None}, "a prompt is text"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be a list of token ids"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([{"role": "user"}], "content"),
    ],
)
def test_bad_prompts(llm, prompt, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate([prompt], GREEDY)


@pytest.mark.parametrize("salt", [5, b"x", True, [7]])
def test_a_salt_is_text(llm, salt):
    with pytest.raises(InvalidRequestError, match="cache_salt must be text or None"):
        llm.generate(FRANCE, GREEDY, cache_salt=salt)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], 5, [5]])
def test_params_of_another_type(llm, params):
    with pytest.raises(InvalidRequestError, match="params"):
        llm.generate(FRANCE, params)
    with pytest.raises(InvalidRequestError, match="params"):
        llm.stream(FRANCE, params)


def test_case_19_emoji_and_cjk_stream(llm):
    """Case 19: concatenated deltas equal the full text, no replacement character."""
    prompt = "Repeat: 日本語テキスト 🎉🚀 naïve. Repeat: 日本語テキスト 🎉"
    parts = list(llm.stream(prompt, GREEDY.replace(max_tokens=20)))
    final = parts[-1].outputs[0]
    assert final.text == llm.tokenizer.decode(final.token_ids)
    for part in parts[:-1]:
        assert "\ufffd" not in part.outputs[0].text
        assert final.text.startswith(part.outputs[0].text)


def test_two_engines_in_one_process(llm):
    other = LLM("smollm2-135m", dtype="float32", block_size=16, max_model_len=256)
    a = llm.generate(FRANCE, GREEDY)[0].outputs[0].token_ids
    b = other.generate(FRANCE, GREEDY)[0].outputs[0].token_ids
    assert a == b
    other.shutdown()
    with pytest.raises(EngineDeadError):
        other.generate(FRANCE, GREEDY)
    assert llm.generate(FRANCE, GREEDY)[0].outputs[0].token_ids == a


def test_a_request_that_overflows_harms_no_later_one():
    """NaN in the KV of a failed request would pass through masks into whoever gets its blocks."""
    llm = LLM("smollm2-135m", dtype="float32", num_blocks=8, max_model_len=200)
    llm.engine._core._runner._decoder._embedding[9] = float("nan")
    (bad,) = llm.generate([[9] * 120], GREEDY)
    assert bad.outputs[0].finish_reason is FinishReason.ERROR and "finite" in bad.error
    for _ in range(3):
        for output in llm.generate([[11, 12], [13, 14, 15], [16] * 40], GREEDY):
            assert output.outputs[0].finish_reason is FinishReason.LENGTH, output.error


def test_unknown_model_and_key():
    with pytest.raises(ModelLoadError, match="smollm2-135m"):
        LLM("smollm2-135")
    with pytest.raises(ConfigError, match="block_size"):
        LLM("smollm2-135m", block_sise=16)


def test_pool_smaller_than_a_request():
    llm = LLM("smollm2-135m", num_blocks=2, block_size=16, max_model_len=512)
    with pytest.raises(InvalidRequestError, match=r"32"):
        llm.generate([list(range(100, 140))], GREEDY)
    assert llm.generate([[5, 6, 7]], GREEDY)[0].finished


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_interrupt_leaves_no_dead_state():
    """Ctrl-C in the middle of a long generate: the same LLM works on, with a clean pool."""
    script = """
        import os, signal, threading
        from tiny_vllm import LLM, SamplingParams
        # A shell's background jobs are born with the signal ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        llm = LLM("smollm2-135m", max_model_len=2048, debug_checks=True)
        params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            llm.generate(["Once", "Twice"], params)
        except KeyboardInterrupt:
            print("interrupted")
        assert not llm.engine.has_unfinished_requests()
        llm.engine.check_invariants()
        short = params.replace(max_tokens=2)
        print(llm.generate("The capital of France is", short)[0].outputs[0].text)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100
    )
    assert run.stdout.splitlines()[0] == "interrupted", run.stderr
    assert "Paris" in run.stdout and run.returncode == 0


def test_prompts_run_in_the_order_of_their_tree_and_come_back_in_the_callers(llm):
    documents = [f"Document {i}. " + f"It speaks of {i} things. " * 12 for i in range(3)]
    prompts = [documents[i % 3] + f"Question {i}?" for i in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    llm.reset_prefix_cache()
    there = llm.generate(prompts, params)
    llm.reset_prefix_cache()
    plain = llm.generate(prompts, params, reorder=False)
    assert [o.prompt for o in there] == [o.prompt for o in plain] == prompts
    assert [o.outputs[0].token_ids for o in there] == [o.outputs[0].token_ids for o in plain]
    starts = sorted(range(9), key=lambda i: there[i].metrics.first_scheduled_time)
    assert [i % 3 for i in starts] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_each_prompt_may_have_its_own_salt(llm):
    prompts = [FRANCE + " It is known for"] * 3
    llm.generate(prompts[0], GREEDY, cache_salt="first")
    outputs = llm.generate(prompts, GREEDY, cache_salt=["first", "second", None])
    assert [o.num_cached_tokens > 0 for o in outputs] == [True, False, False]
    with pytest.raises(InvalidRequestError, match="2 values of cache_salt for 3 prompts"):
        llm.generate(prompts, GREEDY, cache_salt=["a", "b"])


def test_the_report_names_the_texts_at_which_prompts_part(llm):
    common = "The capital of a country is where its government sits. " * 3
    llm.reset_prefix_cache()
    llm.generate(common + "Name that of Germany", GREEDY)
    (output,) = llm.generate(common + "Name one in Spain", GREEDY)
    report = output.cache_report
    assert output.num_cached_tokens == report.cached_tokens > 20
    assert "' one' here, ' that' in request" in str(report)


def test_a_pin_harms_no_request_called_pin(llm):
    """The look-up of a pin went under the id "pin", and took that request's hashes away."""
    ids = llm.get_tokenizer().encode("The river runs past the mill and the old school. " * 8)
    expected = llm.generate(ids, GREEDY)[0].outputs[0].token_ids
    engine = llm.engine
    engine.add_request("pin", ids, GREEDY)
    outputs = engine.step()
    kept = engine.pin_prefix(ids[:40])
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[-1].outputs[0].token_ids == expected
    assert engine.unpin(kept.pin_id)


def test_a_pinned_prompt_is_cached_until_it_is_unpinned(llm):
    llm.reset_prefix_cache()
    pin = llm.pin("The capital of a country is where its government sits. " * 8)
    assert pin.num_tokens >= 64 and pin.num_blocks * 32 == pin.num_tokens
    assert llm.unpin(pin) and not llm.unpin(pin)
    for ttl in (0, -1, float("nan"), "5"):
        with pytest.raises(InvalidRequestError, match="ttl"):
            llm.pin("Hello", ttl=ttl)
    llm.engine.check_invariants()
