"""The baseline on tiny random models against a loop without any cache, in plain arithmetic."""

import math

import pytest
import torch
from origin_models import (
    GREEDY,
    LLAMA,
    MISTRAL,
    QWEN2,
    no_cache,
    plain_attention,
    prompts,
    run,
    settings,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from tiny_vllm.errors import ConfigError
from tiny_vllm.models.registry import parse_model_config
from tiny_vllm.origin import OriginEngine
from tiny_vllm.origin.attention import DecodeAttention, PrefillAttention
from tiny_vllm.origin.kv_cache import ContiguousKvCache
from tiny_vllm.origin.runner import context_tokens


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
        assert torch.equal(cache.keys[0][1], k.transpose(0, 1))
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
