"""The extended engine on CUDA: every switch gives the same tokens, and the CPU's text."""

import json
from itertools import zip_longest

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tiny_vllm import LLM, SamplingParams
from tiny_vllm.errors import ConfigError
from tiny_vllm.models.registry import parse_model_config
from tiny_vllm.models.weight_map import expected_tensors
from tiny_vllm.outputs import FinishReason

pytestmark = pytest.mark.timeout(600)  # the first engines compile their kernels

DEVICE = "cuda"
VOCAB = 1000
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "eos_token_id": None,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "A list of the planets, from the sun outwards: Mercury, Venus,",
    "The capital of France is Paris, and the capital of Italy is",
    "To bake bread you need flour, water, salt and",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondria is the",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model whose attention decides the tokens."""
    path = tmp_path_factory.mktemp("llama")
    (path / "config.json").write_text(json.dumps(LLAMA))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.1
        for name, shape in expected_tensors(parse_model_config(LLAMA)).items()
    }
    save_file(tensors, path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def prompts():
    """Families of a common beginning, nested; ragged ends; a prompt of one token."""
    rng = np.random.default_rng(1)
    stem = rng.integers(0, VOCAB, 700)
    prompts = [[5]]
    for i in range(23):
        keep = (700, 448, 449, 130, 0)[i % 5]
        prompts.append([*stem[:keep].tolist(), *rng.integers(0, VOCAB, 1 + 7 * i).tolist()])
    return prompts


def build(folder, **changes):
    """An engine with a small pool: several may be alive at once."""
    values = {
        "device": DEVICE,
        "dtype": "float32",
        "num_blocks": 600,
        "block_size": 64,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
        "max_model_len": 2048,
        "skip_tokenizer_init": True,
        "debug_checks": True,
        **changes,
    }
    return LLM(folder, **values)


def tokens(llm, prompts, params=GREEDY):
    outputs = llm.generate(prompts, params)
    assert all(o.finished and o.outputs[0].finish_reason is FinishReason.LENGTH for o in outputs)
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def expected(folder, prompts):
    """The answers of the torch backend, one prompt at a time."""
    with build(folder, attention_backend="torch", enable_prefix_caching=False) as llm:
        return [tokens(llm, [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "per-request"},
        {"use_cuda_graph": False},
        {"async_scheduling": False},
        {"use_cuda_graph": False, "async_scheduling": False, "attention": "per-request"},
        {"attention_backend": "torch"},
        {"enable_prefix_caching": False},
        {"block_size": 16, "num_blocks": 2400},
        {"block_size": 128},
        {"max_num_batched_tokens": 300},
        {"max_num_seqs": 5},
        {"num_blocks": 60},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()) or "default",
)
def test_every_setting_gives_the_same_tokens(folder, prompts, expected, changes):
    with build(folder, **changes) as llm:
        cold = tokens(llm, prompts)
        warm = tokens(llm, prompts)
    assert cold == expected
    assert warm == expected


@pytest.mark.parametrize("block_size", [16, 128])
def test_a_block_that_matches_in_part_is_copied(folder, prompts, block_size):
    """Cut and continued otherwise at any token: the copied part answers as a computed one."""
    stem = prompts[20]
    cuts = [1, 15, 17, 63, 127, 129, 200, 333, len(stem) - 1]
    others = [[*stem[:cut], (stem[cut] + 1) % VOCAB, 7] for cut in cuts]
    with build(folder, block_size=block_size, enable_prefix_caching=False) as llm:
        cold = tokens(llm, others)
    with build(folder, block_size=block_size) as llm:
        tokens(llm, [stem])
        warm = llm.generate(others, GREEDY)
        assert [o.outputs[0].token_ids for o in warm] == cold
        assert [o.num_cached_tokens for o in warm] == cuts
        assert llm.engine.ledger.copied_tokens == sum(cut % block_size for cut in cuts)


def test_preemption_gives_the_same_tokens(folder, prompts, expected):
    """A pool in which the requests do not fit together once they have grown."""
    with build(folder, block_size=16, num_blocks=120) as llm:
        assert tokens(llm, prompts) == expected
        assert llm.engine.ledger.num_preemptions > 0


def test_draws_do_not_depend_on_the_settings(folder, prompts):
    """Seeded: graphs, run-ahead and company change no draw."""
    params = [
        GREEDY.replace(temperature=t, seed=i, top_k=k, top_p=p)
        for i, (t, k, p) in enumerate([(0.0, -1, 1.0), (1.0, -1, 1.0), (0.7, 20, 0.9)] * 8)
    ]
    with build(folder) as llm:
        together = tokens(llm, prompts, params)
        alone = [tokens(llm, [p], [q])[0] for p, q in zip(prompts[:6], params, strict=False)]
    with build(folder, use_cuda_graph=False, async_scheduling=False) as llm:
        assert tokens(llm, prompts, params) == together
    with build(folder, attention_backend="torch") as llm:
        assert tokens(llm, prompts, params) == together
    assert alone == together[:6]


def test_two_engines_in_one_process(folder, prompts, expected):
    with build(folder) as one, build(folder, block_size=16, num_blocks=2400) as two:
        streams = [llm.stream(prompts[9], GREEDY) for llm in (one, two)]
        for _ in zip_longest(*streams):  # turn by turn
            pass
        assert tokens(one, prompts[:6]) == expected[:6]
        assert tokens(two, prompts[:6]) == expected[:6]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(folder, prompts, expected, dtype):
    """Other roundings, other tokens, in time: the first ones mostly agree."""
    with build(folder, dtype=dtype) as llm:
        answers = tokens(llm, prompts)
        warm = tokens(llm, prompts)
    assert all(len(answer) == 40 and max(answer) < VOCAB for answer in (*answers, *warm))
    same = sum(a[0] == b[0] for a, b in zip(answers, expected, strict=True))
    assert same >= len(prompts) * 3 // 4


def test_long_prompts_in_half_precision(folder):
    """Long chunks, whole and continued, take another kernel: the answer hardly moves."""
    prompt = np.random.default_rng(2).integers(0, VOCAB, 9000).tolist()
    params = GREEDY.replace(max_tokens=1, logprobs=20)
    answers = []
    for budget in (16384, 4096, 512):
        limits = {"max_num_batched_tokens": budget, "max_model_len": 16384}
        with build(folder, dtype="bfloat16", **limits) as llm:
            (output,) = llm.generate([prompt], params)
            (entry,) = output.outputs[0].logprobs
            answers.append({token: value.logprob for token, value in entry.items()})
    for other in answers[1:]:
        common = answers[0].keys() & other.keys()
        assert len(common) >= 12
        assert all(abs(answers[0][t] - other[t]) < 0.1 for t in common)


@pytest.mark.real_model
def test_the_text_of_the_cpu():
    """Token for token in float32; a prompt may part only where two tokens are as likely."""
    params = SamplingParams(temperature=0.0, max_tokens=64, logprobs=2)
    config = {"dtype": "float32", "max_model_len": 512, "num_blocks": 200, "block_size": 32}
    found = {}
    for device in ("cpu", DEVICE):
        with LLM("smollm2-135m", device=device, **config) as llm:
            found[device] = [o.outputs[0] for o in llm.generate(PROMPTS, params)]
            plain = [o.outputs[0] for o in llm.generate(PROMPTS, params.replace(logprobs=None))]
        assert [p.token_ids for p in plain] == [f.token_ids for f in found[device]]
    parted = 0
    for cpu, gpu in zip(found["cpu"], found[DEVICE], strict=True):
        if cpu.token_ids == gpu.token_ids:
            assert cpu.text == gpu.text
            continue
        parted += 1
        pairs = zip(cpu.token_ids, gpu.token_ids, strict=False)
        at = next(i for i, (a, b) in enumerate(pairs) if a != b)
        best, second = sorted((v.logprob for v in cpu.logprobs[at].values()), reverse=True)[:2]
        assert best - second < 1e-3
    assert parted <= 1


@pytest.mark.real_model
def test_bf16_writes_sense():
    with LLM("smollm2-135m", device=DEVICE, dtype="bfloat16", num_blocks=100) as llm:
        (output,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=8))
    assert output.outputs[0].text.startswith(" Paris")


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"num_blocks": None, "kv_cache_memory_bytes": 1000}, "block"),
        ({"num_blocks": None, "max_num_batched_tokens": 10**9}, "max_num_batched_tokens"),
        ({"num_blocks": 10**9}, "num_blocks"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "max_num_batched"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(folder, changes, name):
    """Named, not a CUDA error; and the next engine runs."""
    with pytest.raises(ConfigError, match=name):
        build(folder, **changes)
    with build(folder) as llm:
        assert len(tokens(llm, [[1, 2, 3]])[0]) == 40
