"""SmolLM2-135M in fp32 against transformers: 64 greedy tokens of 40 prompts.

Greedy decoding is checked by feeding our output back: token i of ours must be the
arg-max of transformers' logits after the prompt and our tokens before i. By induction
that is the same as comparing two greedy runs, and each position is checked by itself.
"""

import pytest
import torch

from tiny_vllm import LLM, SamplingParams
from tiny_vllm.bench.flips import PROMPTS
from tiny_vllm.hub import resolve_model
from tiny_vllm.weights import open_weights

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.real_model, pytest.mark.slow]

NUM_TOKENS = 64
TIE = 1e-4  # a top-2 gap below this is a tie in fp32


@pytest.fixture(scope="module")
def reference():
    source = open_weights(resolve_model("smollm2-135m"))
    values = {k: v for k, v in source.config.items() if k != "architectures"}
    config = transformers.LlamaConfig(**{**values, "dtype": "float32"})
    with torch.no_grad():
        model = transformers.LlamaForCausalLM(config).eval().float()
        model.load_state_dict(dict(source.tensors()), strict=False)
        model.tie_weights()
    return model


def test_forty_prompts_equal_transformers(reference):
    assert len(PROMPTS) == len(set(PROMPTS)) == 40
    llm = LLM("smollm2-135m", dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    differing = []
    for output in llm.generate(PROMPTS, params):
        ours = output.outputs[0].token_ids
        assert len(ours) == NUM_TOKENS
        ids = torch.tensor([output.prompt_token_ids + ours[:-1]])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(output.prompt_token_ids) - 1 :]
        for i in torch.nonzero(logits.argmax(-1) != torch.tensor(ours)).flatten().tolist():
            top = logits[i].topk(2).values
            gap = float(top[0] - top[1])
            differing.append((output.prompt, i, gap))
    for prompt, position, gap in differing:
        print(f"{prompt!r} differs at output token {position}: top-2 gap {gap:.2e}")
    assert all(gap < TIE for _, _, gap in differing), differing


def test_case_12_cold_warm_and_batched_give_the_same_tokens_in_float32():
    """Each of 40 prompts alone and cold, alone and warm, and warm in a batch of 16."""
    llm = LLM("smollm2-135m", dtype="float32", max_model_len=256, max_num_seqs=16)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    cold, warm = [], []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        cold += llm.generate([prompt], params)
    llm.generate(PROMPTS, params)
    for prompt in PROMPTS:
        warm += llm.generate([prompt], params)
    batched = llm.generate(PROMPTS, params)
    assert all(output.num_cached_tokens == 0 for output in cold)
    for hit in (*warm, *batched):
        assert hit.num_cached_tokens == len(hit.prompt_token_ids) - 1
    expected = [output.outputs[0].token_ids for output in cold]
    assert [output.outputs[0].token_ids for output in warm] == expected
    assert [output.outputs[0].token_ids for output in batched] == expected
