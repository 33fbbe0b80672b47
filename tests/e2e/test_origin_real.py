"""The baseline on the real small model: slots, refills and text against a plain loop."""

import pytest
import torch
import torch.nn.functional as F

from tiny_vllm.config import EngineConfig
from tiny_vllm.hub import resolve_model
from tiny_vllm.origin import OriginEngine
from tiny_vllm.sampling_params import SamplingParams
from tiny_vllm.tokenizer import load_tokenizer

pytestmark = pytest.mark.real_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "A list of the planets, from the sun outwards: Mercury, Venus,",
]


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig.create(
        model="smollm2-135m",
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_num_seqs=3,
        max_model_len=256,
    )
    engine = OriginEngine.build(config)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("smollm2-135m"))


def run(engine, requests):
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    last = {}
    while engine.has_unfinished_requests():
        last.update((output.request_id, output) for output in engine.step())
    engine.ledger.check()
    return last


def no_cache(engine, prompt, output):
    """What a greedy loop without a cache says after each prefix of prompt + output.

    One causal pass gives them all; equal to ``output``, it is what the loop itself produces.
    """
    tokens = [*prompt, *output[:-1]]

    def attend(layer, q, k, v):
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    decoder = engine._runner._decoder
    hidden = decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    return decoder.logits(hidden[len(prompt) - 1 :]).argmax(dim=-1).tolist()


def test_greedy_tokens_of_ragged_prompts_equal_a_loop_without_cache(engine, tokenizer):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = {str(i): (tokenizer.encode(text), params) for i, text in enumerate(PROMPTS)}
    assert len({len(prompt) for prompt, _ in requests.values()}) > 2
    outputs = run(engine, requests)
    for request_id, (prompt, _) in requests.items():
        completion = outputs[request_id].outputs[0]
        assert len(completion.token_ids) == 20
        assert completion.token_ids == no_cache(engine, prompt, completion.token_ids)
        assert completion.text == tokenizer.decode(completion.token_ids)
    assert "Paris" in outputs["0"].outputs[0].text


def test_a_stop_string_ends_the_text_before_it(engine, tokenizer):
    prompt = tokenizer.encode(PROMPTS[0])
    params = SamplingParams(temperature=0, max_tokens=20)
    free = run(engine, {"a": (prompt, params)})["a"].outputs[0]
    stop = free.text[8:12]
    completion = run(engine, {"a": (prompt, params.replace(stop=stop))})["a"].outputs[0]
    assert completion.text == free.text[: free.text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < len(free.token_ids)


def test_logprobs_carry_the_text_of_their_tokens(engine, tokenizer):
    prompt = tokenizer.encode(PROMPTS[0])
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=0)
    output = run(engine, {"a": (prompt, params)})["a"]
    for token_id, entry in zip(
        output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
    ):
        assert entry[token_id].decoded_token == tokenizer.token_text(token_id)
        assert entry[token_id].rank == 1
    assert output.prompt_logprobs[0] is None
    assert [list(entry) for entry in output.prompt_logprobs[1:]] == [[i] for i in prompt[1:]]
