"""Built-in workloads: sizes of the table, determinism, vocabulary, scale and caps."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tiny_vllm.bench.trace import trace_sha256
from tiny_vllm.bench.workloads import (
    BUILDERS,
    DESCRIPTIONS,
    PromptEncoder,
    Workload,
    build_workload,
)
from tiny_vllm.env import Switches
from tiny_vllm.errors import ConfigError, TraceError

VOCAB = 49152


class WordEncoder:
    """One id per word; a chat is its contents."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [1, *(i for message in messages for i in self.encode(message["content"])), 2]


def no_encoder() -> PromptEncoder:
    raise AssertionError("token-id workloads must not load a tokenizer")


def build(name: str, **options: object) -> Workload:
    return build_workload(name, VOCAB, no_encoder, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "count", "prompt", "output"),
    [
        ("seed", 2, 513, 7679),
        ("single", 1, 1024, 512),
        ("prefill-1x8k", 1, 8192, 1),
        ("prefill-1x32k", 1, 32768, 1),
        ("cold-64x2k", 64, 2048, 128),
        ("shared-32x8k", 32, 8192 + 64, 256),
        ("shared-16x1.5k", 16, 1536 + 64, 64),
        ("shared-3x2k", 3, 2048 + 64, 256),
        ("forest", 128, 1024 + 8192 + 64, 128),
    ],
)
def test_sizes(name: str, count: int, prompt: int, output: int) -> None:
    requests = build(name).requests
    assert len(requests) == count
    assert {r.num_prompt_tokens for r in requests} == {prompt}
    assert {r.max_tokens for r in requests} == {output}
    assert len({r.request_id for r in requests}) == count


def first_numbers(text: str) -> list[int]:
    """The lengths in a description: "512 common + 1 own" is 512 and 1."""
    return [int(re.findall(r"\d+", part)[0]) for part in text.split(" + ")]


@pytest.mark.parametrize("name", BUILDERS)
def test_the_description_of_a_workload_is_true(name: str) -> None:
    told, requests = DESCRIPTIONS[name], build(name).requests
    assert int(told.requests) == len(requests)
    assert sum(first_numbers(told.prompt)) == requests[0].num_prompt_tokens
    assert first_numbers(told.output) == [requests[0].max_tokens]


def test_every_workload_is_described() -> None:
    assert set(DESCRIPTIONS) == {*BUILDERS, "demo", "shared-BxPk"}


def test_seed_generates_15358_tokens() -> None:
    """The reference's trace: 2 x (8192 - 513), from 512 common tokens and 1 own."""
    first, second = build("seed").requests
    assert first.max_tokens + second.max_tokens == 15358
    assert first.token_ids[:512] == second.token_ids[:512]
    assert first.token_ids[512] != second.token_ids[512]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)


def test_shared_prompts_share_exactly_their_prefix() -> None:
    first, *others = build("shared-4x1k").requests
    assert all(1024 <= common_prefix(first.token_ids, o.token_ids) < 1030 for o in others)


def test_forest_interleaves_eight_documents() -> None:
    requests = build("forest").requests
    assert 1024 <= common_prefix(requests[0].token_ids, requests[1].token_ids) < 1030
    assert common_prefix(requests[0].token_ids, requests[8].token_ids) >= 1024 + 8192


def test_cold_prompts_share_nothing() -> None:
    workload = build("cold-64x2k")
    assert workload.is_random
    assert len({tuple(r.token_ids[:4]) for r in workload.requests}) == 64


def test_the_seed_draws_the_ids() -> None:
    again = trace_sha256(build("single", seed=3).requests)
    assert trace_sha256(build("single", seed=3).requests) == again
    assert trace_sha256(build("single", seed=4).requests) != again


def test_ids_are_the_same_on_every_machine() -> None:
    """A published trace hash must mean the same trace everywhere."""
    assert build("seed", seed=0).requests[0].token_ids[:4] == (12680, 25317, 4306, 47880)


@pytest.mark.parametrize("vocab", [64, 1000])
def test_ids_lie_in_the_vocabulary_above_the_special_ones(vocab: int) -> None:
    workload = build_workload("shared-4x1k", vocab, no_encoder)
    ids = {i for r in workload.requests for i in r.token_ids}
    assert min(ids) >= 10
    assert max(ids) < vocab


def test_scale_shrinks_prompt_and_output() -> None:
    (request,) = build("single", scale=0.125).requests
    assert (request.num_prompt_tokens, request.max_tokens) == (128, 64)
    first, _ = build("seed", scale=0.0625).requests
    assert (first.num_prompt_tokens, first.max_tokens) == (33, 512 - 33)
    assert build("prefill-1x8k", scale=0.0001).requests[0].num_prompt_tokens == 1


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.5])
def test_a_scale_that_does_not_shrink_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match=f"scale={scale}"):
        build("single", scale=scale)


@pytest.mark.parametrize(
    ("name", "near"), [("sinlge", "single"), ("forrest", "forest"), ("shared-8xk", "shared")]
)
def test_an_unknown_workload_names_its_nearest(name: str, near: str) -> None:
    with pytest.raises(TraceError, match=f"unknown workload '{name}'; did you mean '{near}"):
        build(name)


@pytest.mark.parametrize("name", ["shared-0x8k", "shared-4x0k", "shared-4x", "", "."])
def test_workloads_without_meaning_are_refused(name: str) -> None:
    with pytest.raises(TraceError, match="unknown workload"):
        build(name)


def test_max_new_tokens_caps_every_output_and_says_so() -> None:
    workload = build("seed", switches=Switches(max_new_tokens_generated=64))
    assert [r.max_tokens for r in workload.requests] == [64, 64]
    assert workload.notes == ("MAX_NEW_TOKENS_GENERATED=64 shortened 2 of 2 requests",)


def test_zero_is_no_cap() -> None:
    workload = build("single", switches=Switches(max_new_tokens_generated=0))
    assert workload.requests[0].max_tokens == 512
    assert workload.notes == ()


def test_max_seq_len_is_the_length_that_seed_decodes_to() -> None:
    for limit in (1024, 9000):
        workload = build("seed", switches=Switches(max_seq_len=limit))
        assert {r.max_tokens for r in workload.requests} == {limit - 513}


def test_max_seq_len_shortens_outputs_and_leaves_long_prompts_to_be_refused() -> None:
    (capped,) = build("single", switches=Switches(max_seq_len=1100)).requests
    assert capped.max_tokens == 1100 - 1024
    (too_long,) = build("single", switches=Switches(max_seq_len=1000)).requests
    assert (too_long.num_prompt_tokens, too_long.max_tokens) == (1024, 512)


def test_demo_asks_sixteen_questions_about_one_document() -> None:
    workload = build_workload("demo", VOCAB, WordEncoder)
    prompts = [r.token_ids for r in workload.requests]
    assert len(prompts) == 16
    assert len({tuple(p) for p in prompts}) == 16
    assert {r.max_tokens for r in workload.requests} == {64}
    assert len({tuple(p[:1200]) for p in prompts}) == 1


def test_scaled_demo_keeps_its_questions() -> None:
    full = build_workload("demo", VOCAB, WordEncoder)
    small = build_workload("demo", VOCAB, WordEncoder, scale=0.25)
    assert small.requests[3].num_prompt_tokens < full.requests[3].num_prompt_tokens / 2
    assert small.requests[3].token_ids[-4:] == full.requests[3].token_ids[-4:]
    assert small.requests[3].max_tokens == 16


def test_a_trace_file_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt_token_ids": [5, 6], "max_tokens": 3, "arrival": 0.5},
        {"prompt": "one two three", "max_tokens": 2},
        {"messages": [{"role": "user", "content": "four five"}], "max_tokens": 1},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    workload = build_workload(str(path), VOCAB, WordEncoder)
    assert workload.name == "mine.jsonl"
    assert [r.num_prompt_tokens for r in workload.requests] == [2, 3, 4]
    assert [r.arrival for r in workload.requests] == [0.5, None, None]
    assert workload.longest == 5
    with pytest.raises(ConfigError, match="built-in workloads only"):
        build_workload(str(path), VOCAB, WordEncoder, scale=0.5)


def test_a_trace_of_ids_needs_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6], "max_tokens": 3}\n')
    assert build(str(path)).requests[0].token_ids == (5, 6)
