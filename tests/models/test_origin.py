"""The baseline on tiny random models against a loop without any cache, in plain arithmetic."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    RequestTooLongError,
)
from tiny_vllm.models.registry import parse_model_config
from tiny_vllm.models.weight_map import expected_tensors
from tiny_vllm.origin import OriginEngine
from tiny_vllm.origin.attention import DecodeAttention, PrefillAttention
from tiny_vllm.origin.kv_cache import ContiguousKvCache
from tiny_vllm.origin.runner import context_tokens
from tiny_vllm.outputs import FinishReason
from tiny_vllm.sampling_params import SamplingParams

VOCAB = 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 5}
QWEN2 = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def folder(tmp_path):
    """Writes a model with weights large enough for attention to decide the tokens."""

    def write(config=LLAMA):
        (tmp_path / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(3)
        tensors = {
            name: torch.ones(shape)
            if "norm" in name
            else torch.randn(shape, generator=generator) * 0.4
            for name, shape in expected_tensors(parse_model_config(config)).items()
        }
        save_file(tensors, tmp_path / "model.safetensors")
        return str(tmp_path)

    return write


def settings(model, **changes):
    values = {"max_num_seqs": 3, "dtype": "float32", "device": "cpu", "num_threads": 1}
    return EngineConfig.create(**{"model": model, "skip_tokenizer_init": True, **values, **changes})


@pytest.fixture
def build(folder):
    def make(config=LLAMA, **changes):
        return OriginEngine.build(settings(folder(config), **changes))

    return make


def prompts(count, longest=40):
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def run(engine, requests):
    """Drive all requests to their end; the last output of each, by id."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id not in last or not last[output.request_id].finished
            last[output.request_id] = output
        engine.ledger.check()
    assert all(output.finished for output in last.values())
    return last


def plain_attention(model):
    """Attention over the whole prompt, a query at a time, from the definition."""

    def attend(layer, q, k, v):
        window = model.layer_window(layer) or len(q)
        group = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for t in range(len(q)):
            seen = slice(max(0, t - window + 1), t + 1)
            for head in range(q.shape[1]):
                keys, values = k[seen, head // group], v[seen, head // group]
                weights = (keys @ q[t, head] / math.sqrt(q.shape[-1])).softmax(-1)
                out[t, head] = weights @ values
        return out

    return attend


def no_cache(engine, prompt, num_tokens):
    """Greedy tokens and their log-probabilities, every token recomputed in every step."""
    decoder, model = engine._runner._decoder, engine._runner._model
    tokens, logprobs = list(prompt), []
    for _ in range(num_tokens):
        positions = torch.arange(len(tokens))
        hidden = decoder.forward(torch.tensor(tokens), positions, plain_attention(model))
        distribution = decoder.logits(hidden[-1:])[0].log_softmax(-1)
        tokens.append(int(distribution.argmax()))
        logprobs.append(float(distribution[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


class TestAgainstTheDefinition:
    @pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN2], ids=["full", "window", "mixed"])
    def test_greedy_tokens_of_ragged_requests_in_three_slots(self, build, config):
        engine = build(config)
        limits = [12, 3, 9, 1, 12, 7]
        requests = {
            str(i): (prompt, GREEDY.replace(max_tokens=limits[i], logprobs=0))
            for i, prompt in enumerate(prompts(6))
        }
        outputs = run(engine, requests)
        assert len({tuple(o.outputs[0].token_ids) for o in outputs.values()}) == 6
        for request_id, (prompt, params) in requests.items():
            completion = outputs[request_id].outputs[0]
            tokens, logprobs = no_cache(engine, prompt, params.max_tokens)
            assert completion.token_ids == tokens
            found = [
                entry[token].logprob
                for entry, token in zip(completion.logprobs, tokens, strict=True)
            ]
            assert found == pytest.approx(logprobs, abs=1e-4)
            assert completion.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-3)

    def test_a_window_changes_the_output(self, build):
        """Else the windowed cases above would pass with the window ignored."""
        prompt = prompts(1)[0] * 3
        full = run(build(MISTRAL | {"sliding_window": None}), {"a": (prompt, GREEDY)})
        windowed = run(build(MISTRAL), {"a": (prompt, GREEDY)})
        assert full["a"].outputs[0].token_ids != windowed["a"].outputs[0].token_ids

    def test_prompt_logprobs(self, build):
        engine = build()
        prompt = prompts(3)[2]
        output = run(engine, {"a": (prompt, GREEDY.replace(prompt_logprobs=2))})["a"]
        decoder = engine._runner._decoder
        attend = plain_attention(engine._runner._model)
        hidden = decoder.forward(torch.tensor(prompt), torch.arange(len(prompt)), attend)
        expected = decoder.logits(hidden).log_softmax(-1)
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for i, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry[prompt[i + 1]].logprob == pytest.approx(
                float(expected[i, prompt[i + 1]]), abs=1e-4
            )
            assert set(expected[i].topk(2).indices.tolist()) <= set(entry)

    @pytest.mark.parametrize("window", [None, 1, 7, 2000])
    def test_long_windowed_prefill_equals_a_masked_softmax(self, window):
        """Longer than a chunk of queries, so that the pieces have to meet."""
        model = parse_model_config({**MISTRAL, "sliding_window": window, "num_hidden_layers": 1})
        length = 1500
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(length, heads, 8, generator=generator) for heads in (4, 2, 2))
        cache = ContiguousKvCache(model, 2, length, torch.float32, torch.device("cpu"))
        out = PrefillAttention(cache, model, 1)(0, q, k, v)
        place = torch.arange(length)
        hidden = place > place[:, None]
        if window is not None:
            hidden |= place <= place[:, None] - window
        for head in range(4):
            scores = q[:, head] @ k[:, head // 2].T / math.sqrt(8)
            expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, head // 2]
            torch.testing.assert_close(out[:, head], expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(cache.keys[0][1], k)
        assert not cache.keys[0][0].any()


class TestSlots:
    def test_a_free_slot_is_refilled_before_the_next_decode(self, build):
        engine = build(max_num_seqs=2)
        for i, limit in enumerate([2, 5, 5]):
            engine.add_request(str(i), [i + 1], GREEDY.replace(max_tokens=limit))
        kinds = []
        while engine.has_unfinished_requests():
            engine.step()
            step = engine.last_step
            kinds.append((step.kind, step.num_requests, step.num_waiting))
        assert kinds == [
            ("prefill", 1, 2),
            ("prefill", 1, 1),
            ("decode", 2, 1),  # request 0 ends
            ("prefill", 1, 0),
            *[("decode", 2, 0)] * 3,  # request 1 ends
            ("decode", 1, 0),
        ]

    def test_a_gap_is_closed_without_touching_the_rest(self, build):
        """The request of slot 0 ends first; the last slot's KV moves there."""
        engine = build()
        limits = [2, 12, 12]
        requests = {
            str(i): (prompt, GREEDY.replace(max_tokens=limits[i]))
            for i, prompt in enumerate(prompts(3))
        }
        outputs = run(engine, requests)
        for request_id, (prompt, params) in requests.items():
            tokens, _ = no_cache(engine, prompt, params.max_tokens)
            assert outputs[request_id].outputs[0].token_ids == tokens

    def test_the_output_does_not_depend_on_what_the_slot_held_before(self, build):
        engine = build(max_num_seqs=1)
        long, short = prompts(2)[0] * 2, [5, 6]
        alone = run(engine, {"a": (short, GREEDY)})["a"].outputs[0].token_ids
        run(engine, {"b": (long, GREEDY)})
        assert run(engine, {"c": (short, GREEDY)})["c"].outputs[0].token_ids == alone

    def test_what_does_not_fit_is_refused_with_both_numbers(self, folder):
        model = folder()
        per_slot = 2 * 3 * 2 * 8 * 4 * 128
        with pytest.raises(ConfigError, match=f"{3 * per_slot} bytes, {2 * per_slot} are"):
            OriginEngine.build(settings(model, kv_cache_memory_bytes=2 * per_slot))
        with pytest.raises(ConfigError, match="lower max_model_len"):
            OriginEngine.build(
                settings(model, max_num_seqs=None, kv_cache_memory_bytes=per_slot // 2)
            )

    def test_without_a_wish_as_many_slots_as_fit(self, folder):
        per_slot = 2 * 3 * 2 * 8 * 4 * 128
        engine = OriginEngine.build(
            settings(folder(), max_num_seqs=None, kv_cache_memory_bytes=2 * per_slot + 1)
        )
        assert engine.info.config["max_num_seqs"] == 2
        assert str(per_slot) in engine.info.reasons["max_num_seqs"]

    def test_what_the_baseline_lacks_is_off_in_its_facts(self, build):
        info = build().info
        assert info.name == "origin"
        for key in ("enable_prefix_caching", "enable_chunked_prefill", "use_cuda_graph"):
            assert info.config[key] is False
            assert "baseline" in info.reasons[key]


class TestAccounting:
    def test_ledger_and_steps_of_two_requests(self, build):
        engine = build()
        per_token = engine.info.kv_bytes_per_token
        engine.add_request("a", [1, 2, 3, 4, 5], GREEDY.replace(max_tokens=3))
        engine.add_request("b", [7, 8], GREEDY.replace(max_tokens=2))
        seen = []
        while engine.has_unfinished_requests():
            engine.step()
            s = engine.last_step
            assert s.kv_bytes.logical == s.kv_bytes.physical
            assert s.end >= s.start
            context = s.kv_bytes.logical // per_token
            seen.append((s.step, s.num_prefill_tokens, s.num_decode_tokens, s.num_sampled, context))
            seen[-1] += (s.attention_context_tokens, s.num_logit_rows)
        assert seen == [
            (1, 5, 0, 1, 5, 15, 1),
            (2, 2, 0, 1, 2, 3, 1),
            (3, 0, 2, 2, 6 + 3, 6 + 3, 2),  # b ends
            (4, 0, 1, 1, 7, 7, 1),
        ]
        ledger = engine.ledger
        assert (ledger.prompt_tokens, ledger.computed_tokens, ledger.cached_tokens) == (7, 7, 0)
        assert (ledger.decoded_tokens, ledger.forward_tokens) == (3, 10)

    @pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN2], ids=["full", "window", "mixed"])
    @pytest.mark.parametrize("span", [(0, 1), (0, 4), (0, 20), (3, 4), (4, 5), (9, 10), (3, 17)])
    def test_context_tokens_equal_a_count(self, config, span):
        model = parse_model_config(config)
        read = attended = 0
        for layer in range(model.num_layers):
            window = model.layer_window(layer) or 10**6
            seen = [set(range(max(0, p - window + 1), p + 1)) for p in range(*span)]
            read += len(set.union(*seen))
            attended += sum(len(places) for places in seen)
        assert context_tokens(model, [span]) == (read, attended)
        assert context_tokens(model, [span, span]) == (2 * read, 2 * attended)

    def test_times_are_recorded_once_a_token_and_in_order(self, build):
        metrics = run(build(), {"a": ([1, 2], GREEDY)})["a"].metrics
        times = metrics.token_times
        assert len(times) == GREEDY.max_tokens
        assert times == sorted(times)
        assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
        assert (metrics.first_token_time, metrics.finished_time) == (times[0], times[-1])

    def test_snapshots_do_not_change_afterwards(self, build):
        engine = build()
        engine.add_request("a", [1], GREEDY)
        outputs = [engine.step()[0] for _ in range(4)]
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[33, 33, 33], [33, 7, 21]])
def test_attention_takes_the_fused_kernel(dtype, lengths):
    """A mask of the wrong type would fall back to the slow form; here that is an error."""
    model = parse_model_config({**LLAMA, "num_hidden_layers": 1})
    cache = ContiguousKvCache(model, 4, 64, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)

    def rows(count, heads):
        return torch.randn(count, heads, 8, generator=generator).to(dtype)

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        for slot, length in enumerate(lengths):
            prompt = (rows(length - 1, heads) for heads in (4, 2, 2))
            PrefillAttention(cache, model, slot)(0, *prompt)
        newest = (rows(3, heads) for heads in (4, 2, 2))
        out = DecodeAttention(cache, model, lengths)(0, *newest)
    assert out.shape == (3, 4, 8)
    assert out.isfinite().all()
