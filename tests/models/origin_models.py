"""Tiny random models for the baseline's tests, and a greedy loop without any cache."""

import math

import torch

from tiny_vllm.config import EngineConfig
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


def settings(model, **changes):
    values = {"max_num_seqs": 3, "dtype": "float32", "device": "cpu", "num_threads": 1}
    return EngineConfig.create(**{"model": model, "skip_tokenizer_init": True, **values, **changes})


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
