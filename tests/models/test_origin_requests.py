"""How the baseline's requests end, and which are refused."""

import pytest
from origin_models import GREEDY, LLAMA, VOCAB, no_cache, prompts, run

from tiny_vllm.errors import EngineDeadError, InvalidRequestError, RequestTooLongError
from tiny_vllm.outputs import FinishReason
from tiny_vllm.sampling_params import SamplingParams


class TestEndings:
    PROMPT = [3, 1, 4, 1, 5]

    @pytest.fixture
    def tokens(self, build):
        """What the model says greedily; the endings below are cut out of it."""
        tokens = run(build(), {"a": (self.PROMPT, GREEDY)})["a"].outputs[0].token_ids
        assert tokens.index(tokens[4]) == 4
        return tokens

    def finish(self, engine, **params):
        params = {"temperature": 0, "max_tokens": 12, **params}
        return run(engine, {"a": (self.PROMPT, SamplingParams(**params))})["a"].outputs[0]

    def test_length(self, build, tokens):
        completion = self.finish(build(), max_tokens=1)
        assert (completion.token_ids, completion.finish_reason) == (tokens[:1], "length")

    def test_the_context_limit_cuts_the_output(self, build, tokens):
        completion = self.finish(build(max_model_len=9), max_tokens=100)
        assert (completion.token_ids, completion.finish_reason) == (tokens[:4], "length")

    def test_no_max_tokens_runs_to_the_context_limit(self, build, tokens):
        assert self.finish(build(max_model_len=9), max_tokens=None).token_ids == tokens[:4]

    def test_stop_id(self, build, tokens):
        completion = self.finish(build(), stop_token_ids=[tokens[4]])
        assert completion.token_ids == tokens[:5]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[4])

    def test_end_of_sequence(self, build, tokens):
        completion = self.finish(build({**LLAMA, "eos_token_id": [tokens[4]]}))
        assert completion.token_ids == tokens[:5]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)

    def test_ignore_eos(self, build, tokens):
        engine = build({**LLAMA, "eos_token_id": [tokens[4]]})
        assert self.finish(engine, ignore_eos=True).token_ids == tokens

    def test_min_tokens_keeps_the_end_away(self, build, tokens):
        engine = build({**LLAMA, "eos_token_id": [tokens[4]]})
        completion = self.finish(engine, min_tokens=7)
        assert completion.token_ids[:4] == tokens[:4]
        assert tokens[4] not in completion.token_ids[:7]
        assert len(completion.token_ids) >= 7

    def test_a_request_without_a_token_to_draw_ends_with_an_error(self, build):
        """It must not take the others along."""
        engine = build()
        doomed = GREEDY.replace(min_tokens=2, stop_token_ids=range(VOCAB))
        outputs = run(engine, {"bad": ([1], doomed), "good": (self.PROMPT, GREEDY)})
        assert outputs["bad"].outputs[0].finish_reason is FinishReason.ERROR
        assert "masked" in outputs["bad"].error
        assert outputs["good"].error is None
        assert outputs["good"].outputs[0].token_ids == no_cache(engine, self.PROMPT, 12)[0]
        assert engine.ledger.forward_tokens == 1 + 5 + 11


class TestAbort:
    def test_waiting_running_unknown_and_twice(self, build):
        engine = build(max_num_seqs=1)
        engine.add_request("a", [1, 2], GREEDY)
        engine.add_request("b", [3, 4], GREEDY)
        engine.step()
        engine.step()
        waiting, running = engine.abort("b"), engine.abort("a")
        assert waiting.outputs[0].finish_reason is FinishReason.ABORT
        assert waiting.outputs[0].token_ids == []
        assert len(running.outputs[0].token_ids) == 2
        assert running.metrics.finished_time is not None
        assert engine.abort("a") is None
        assert engine.abort("never there") is None
        assert not engine.has_unfinished_requests()
        assert engine.step() == []
        engine.ledger.check()

    def test_the_others_go_on(self, build):
        engine = build()
        first, second, third = prompts(3)
        for request_id, prompt in zip("abc", (first, second, third), strict=True):
            engine.add_request(request_id, prompt, GREEDY)
        for _ in range(5):
            engine.step()
        engine.abort("a")
        outputs = run(engine, {"d": ([9], GREEDY)})
        for request_id, prompt in (("b", second), ("c", third), ("d", [9])):
            expected, _ = no_cache(engine, prompt, 12)
            assert outputs[request_id].outputs[0].token_ids == expected


class TestRequests:
    @pytest.mark.parametrize(
        ("prompt", "changes", "field", "message"),
        [
            ([], {}, "prompt", "empty"),
            ([1, VOCAB], {}, "prompt", r"token 1 is 64; ids must be in \[0, 63\]"),
            ([-1], {}, "prompt", "token 0 is -1"),
            ([1, 2.0], {}, "prompt", "of type float"),
            ([True], {}, "prompt", "of type bool"),
            (["a"], {}, "prompt", "of type str"),
            ([1] * 128, {}, "prompt", "128 tokens and max_model_len=128"),
            ([1], {"n": 2}, "n", "n=2"),
            ([1], {"stop": "x"}, "stop", "tokenizer"),
            ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids", "64"),
            ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias", "64"),
        ],
    )
    def test_a_refusal_names_the_field_and_disturbs_nothing(
        self, build, prompt, changes, field, message
    ):
        engine = build()
        with pytest.raises(InvalidRequestError, match=message) as caught:
            engine.add_request("a", prompt, GREEDY.replace(**changes))
        assert caught.value.field == field
        assert isinstance(caught.value, RequestTooLongError) == (len(prompt) == 128)
        assert not engine.has_unfinished_requests()

    def test_an_id_in_use_is_refused_and_free_again_afterwards(self, build):
        engine = build()
        engine.add_request("a", [1], GREEDY)
        with pytest.raises(InvalidRequestError, match="'a' is in use"):
            engine.add_request("a", [2], GREEDY)
        assert len(run(engine, {})["a"].outputs[0].token_ids) == 12
        run(engine, {"a": ([1], GREEDY)})

    def test_draws_do_not_depend_on_the_company(self, build):
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12)
        unseeded = params.replace(seed=None, top_k=8)
        engine = build()
        alone = run(engine, {"x": ([1, 2, 3], params)})["x"].outputs[0].token_ids
        company = {"p": ([4], GREEDY), "q": ([1, 2, 3], unseeded), "x": ([1, 2, 3], params)}
        outputs = run(engine, company)
        assert outputs["x"].outputs[0].token_ids == alone
        again = run(build(), {"q": ([1, 2, 3], unseeded)})
        assert again["q"].outputs[0].token_ids == outputs["q"].outputs[0].token_ids
        assert outputs["q"].outputs[0].token_ids != alone

    def test_after_shutdown(self, build):
        engine = build()
        engine.add_request("a", [1], GREEDY)
        engine.shutdown()
        engine.shutdown()
        assert not engine.has_unfinished_requests()
        with pytest.raises(EngineDeadError, match="build a new one"):
            engine.step()
        with pytest.raises(EngineDeadError):
            engine.add_request("b", [1], GREEDY)

    def test_no_prefix_cache_to_reset(self, build):
        engine = build()
        engine.add_request("a", [1], GREEDY)
        engine.step()
        assert engine.reset_prefix_cache() is True
