"""The decode loop behind a whole engine core: the torch backend's tokens, however it runs.

Most tests put plain torch in place of the kernels, which the interpreter runs slowly; on
a GPU the kernels themselves run, with and without CUDA graphs.
"""

import dataclasses
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.kernels import plain_kernels
from tiny_vllm.attention.torch_backend import TorchAttention
from tiny_vllm.attention.triton_backend import DecodeBuffers, TritonAttention
from tiny_vllm.config import EngineConfig, ModelConfig
from tiny_vllm.core.scheduler import Scheduler
from tiny_vllm.engine.engine_core import EngineCore
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.loader import LoadedModel
from tiny_vllm.models.weight_map import DecoderWeights, expected_tensors
from tiny_vllm.outputs import FinishReason
from tiny_vllm.request import Request, RequestId
from tiny_vllm.sampling_params import SamplingParams
from tiny_vllm.worker.decode_loop import DecodeLoop
from tiny_vllm.worker.model_runner import ModelRunner

HAS_CUDA = torch.cuda.is_available()
BLOCK = 16
VOCAB = 96
MODEL = ModelConfig(
    architecture="test",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
)
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(autouse=True)
def _no_warnings_of_the_interpreter():
    """Hashes wrap and rows that are not stored take log 0; numpy would report them."""
    with np.errstate(all="ignore"):
        yield


@dataclass
class Traffic:
    """Requests by the step before which they arrive, and aborts."""

    arrivals: list[tuple[int, str, list[int], SamplingParams]] = field(default_factory=list)
    aborts: list[tuple[int, str]] = field(default_factory=list)

    def add(self, step, prompt, max_tokens, request_id=None, **params):
        request_id = request_id or f"r{len(self.arrivals)}"
        values = {"temperature": 0.0, "ignore_eos": True, **params}
        self.arrivals.append(
            (step, request_id, list(prompt), SamplingParams(max_tokens=max_tokens, **values))
        )
        return request_id


@dataclass
class Served:
    """What came out, by request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, FinishReason] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, list] = field(default_factory=dict)
    steps_ahead: int = 0
    steps: int = 0
    core: EngineCore | None = None


class Lab:
    """Builds engines over one set of weights."""

    def __init__(self, device, model=MODEL, seed=3):
        self.device, self.model, self.seed = device, model, seed
        self.nan_tokens: list[int] = []  # their embedding is NaN
        self.mend = False

    def decoder(self, fused):
        generator = torch.Generator().manual_seed(self.seed)
        weights = DecoderWeights(self.model, torch.float32, self.device)
        tensors = {}
        for name, shape in expected_tensors(self.model).items():
            noise = torch.randn(shape, generator=generator)
            tensors[name] = 1 + 0.1 * noise if "norm" in name else noise * 0.4
        tensors["model.embed_tokens.weight"][self.nan_tokens] = torch.nan
        weights.load(tensors.items())
        return Decoder(weights, 512, fused=fused)

    def core(self, triton, *, ahead=True, share=True, graphs=False, warm=False, **changes):
        settings = {
            "model": "test",
            "block_size": BLOCK,
            "num_blocks": 64,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "max_model_len": 400,
            "debug_checks": True,
            "device": self.device.type,
            "dtype": "float32",
            "async_scheduling": ahead and triton,
            **changes,
        }
        config = EngineConfig.create(**settings)
        loaded = LoadedModel(config, self.model, self.decoder(triton), None)
        shape = (self.model, config.num_blocks, config.block_size, torch.float32, self.device)
        with torch.inference_mode():
            if not triton:
                return EngineCore(
                    Scheduler(config), ModelRunner(loaded, TorchAttention(*shape, share=share))
                )
            backend = TritonAttention(*shape, share=share)
            loop = DecodeLoop(
                loaded.decoder,
                backend,
                config.max_num_seqs,
                -(-config.max_model_len // config.block_size) + 1,
                config.max_model_len,
                graphs,
            )
            if warm:
                backend.warm_up(loaded.decoder.forward_fused, config.max_num_batched_tokens)
                loop.capture_all()
            runner = ModelRunner(loaded, backend, loop, ahead)
        return EngineCore(Scheduler(config), runner)

    def serve(self, traffic, core):
        """Run the traffic to its end."""
        served, step = Served(core=core), 0
        pending = sorted(traffic.arrivals, key=lambda a: a[0])
        runner = core._runner
        while pending or core.scheduler.has_unfinished_requests():
            for due, request_id in traffic.aborts:
                if due == step:
                    core.scheduler.finish_request(RequestId(request_id), FinishReason.ABORT)
                    served.finish.setdefault(request_id, FinishReason.ABORT)
            while pending and pending[0][0] <= step:
                _, request_id, prompt, params = pending.pop(0)
                core.scheduler.add_request(
                    Request(RequestId(request_id), prompt, params, params.max_tokens)
                )
                served.tokens[request_id] = []
            for output in core.step():
                served.tokens[output.request_id] += output.new_token_ids
                served.cached[output.request_id] = output.num_cached_tokens
                served.logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
                if output.finish_reason is not None:
                    served.finish[output.request_id] = output.finish_reason
            served.steps_ahead += getattr(runner, "_ahead", None) is not None
            step += 1
            assert step < 3000
        served.steps = step
        return served

    def compare(self, traffic, reference=None, **settings):
        """Serve by the loop; tokens and ends are those of the torch backend."""
        if reference is None:
            roomy = {"num_blocks": 256, "max_num_seqs": 16}
            reference = self.serve(traffic, self.core(False, **roomy))
        served = self.serve(traffic, self.core(True, **settings))
        aborted = {request_id for _, request_id in traffic.aborts}
        for request_id, tokens in reference.tokens.items():
            mine = served.tokens[request_id]
            if request_id in aborted:
                shorter = min(len(mine), len(tokens))
                assert mine[:shorter] == tokens[:shorter], request_id
            else:
                assert mine == tokens, request_id
                assert served.finish[request_id] == reference.finish[request_id], request_id
        return served


@pytest.fixture
def lab(device):
    return Lab(device)


@pytest.fixture
def quick(monkeypatch, device):
    """Plain torch in place of the kernels, unless there is a GPU."""
    if device.type == "cpu":
        plain_kernels.install(monkeypatch)
    return Lab(device)


@pytest.fixture(params=[False, True] if HAS_CUDA else [False], ids=lambda g: "graph" * g or "eager")
def graphs(request):
    return request.param


def tokens_of(rng, count):
    return rng.integers(0, VOCAB, count).tolist()


def small_traffic():
    """A common prefix, arrivals while others decode, a block border, chunks."""
    rng = np.random.default_rng(1)
    common = tokens_of(rng, 45)
    traffic = Traffic()
    traffic.add(0, [*common, 5], 9)
    traffic.add(0, [*common[:40], 6, 7], 12)
    traffic.add(0, [9], 4)
    traffic.add(3, [*common, 1, 2], 5)
    traffic.add(6, [*common, 5, 5], 6, temperature=0.8, seed=4)
    return traffic


@pytest.mark.parametrize("settings", [{}, {"ahead": False, "share": False}], ids=str)
def test_kernels_give_the_tokens_of_the_torch_backend(lab, settings, graphs, monkeypatch):
    monkeypatch.setattr("tiny_vllm.attention.items.MIN_SAVED_TOKENS", 32)
    if lab.device.type == "cpu":  # they have tests of their own, and are slowest here
        monkeypatch.setattr("tiny_vllm.layers.fused_layer.MAX_SKINNY_ROWS", 0)
    served = lab.compare(small_traffic(), graphs=graphs, **settings)
    assert (served.steps_ahead > 5) == settings.get("ahead", True)


def test_the_skinny_products_in_the_loop(lab, graphs):
    traffic = Traffic()
    traffic.add(0, [3, 1, 4, 1, 5, 9, 2, 6], 4)
    traffic.add(0, [2, 7], 3)
    lab.compare(traffic, graphs=graphs)


def random_traffic(rng, requests=14):
    """Prefixes shared at several depths, ends of all kinds, aborts, draws, edits."""
    traffic = Traffic()
    prompts = [tokens_of(rng, int(rng.integers(1, 90)))]
    for _ in range(requests):
        stem = prompts[rng.integers(len(prompts))]
        keep = int(rng.choice([0, len(stem), rng.integers(len(stem) + 1), len(stem) // 16 * 16]))
        prompt = stem[:keep] + tokens_of(rng, int(rng.choice([1, 2, rng.integers(1, 40)])))
        prompts.append(prompt)
        kinds = [{}, {}, {}, {"temperature": 0.9, "seed": int(rng.integers(99))}]
        kinds.append({"temperature": 0.7, "seed": 1, "top_k": 12, "top_p": 0.9})
        kinds.append({"stop_token_ids": tokens_of(rng, 6)})
        kinds.append({"repetition_penalty": 1.3})
        kinds.append({"logprobs": 2})
        kinds.append({"min_tokens": 6, "stop_token_ids": tokens_of(rng, 20)})
        params = kinds[rng.integers(len(kinds))]
        length = int(rng.choice([1, 2, rng.integers(1, 60)]))
        request_id = traffic.add(
            int(rng.integers(0, 25)), prompt, max(length, params.get("min_tokens", 1)), **params
        )
        if rng.random() < 0.15:
            traffic.aborts.append((int(rng.integers(1, 40)), request_id))
    return traffic


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "simple"])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(quick, seed, ahead, graphs, monkeypatch):
    monkeypatch.setattr("tiny_vllm.attention.items.MIN_SAVED_TOKENS", 32)
    traffic = random_traffic(np.random.default_rng(seed))
    quick.compare(traffic, ahead=ahead, share=bool(seed % 4), graphs=graphs)


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_in_a_tiny_pool(quick, seed, graphs, monkeypatch):
    """Preemptions: rows leave in the middle of a run ahead and come back."""
    monkeypatch.setattr("tiny_vllm.attention.items.MIN_SAVED_TOKENS", 32)
    rng = np.random.default_rng(100 + seed)
    traffic = random_traffic(rng, 8)
    for step in range(6):
        traffic.add(step, tokens_of(rng, int(rng.integers(1, 40))), 70)
    served = quick.compare(traffic, num_blocks=13, max_num_seqs=6, graphs=graphs)
    assert served.core.scheduler.ledger.num_preemptions > 0
    assert served.steps_ahead > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True},
        {"sliding_window": 21, "num_full_attention_layers": 1},
        {"qkv_bias": True, "attention_out_bias": True, "num_heads": 2},
        {"mlp_bias": True, "tie_word_embeddings": True, "num_kv_heads": 6},
        {"num_heads": 17, "num_kv_heads": 1},
    ],
    ids=lambda c: "-".join(c),
)
def test_families(device, changes, monkeypatch, graphs):
    monkeypatch.setattr("tiny_vllm.attention.items.MIN_SAVED_TOKENS", 32)
    if device.type == "cpu":
        plain_kernels.install(monkeypatch)
    lab = Lab(device, dataclasses.replace(MODEL, **changes))
    lab.compare(random_traffic(np.random.default_rng(7), 8), graphs=graphs)


def test_long_decodes_outgrow_their_plan(quick, graphs, monkeypatch):
    """A plan holds until a tail has grown by a segment; then there is a new one."""
    plans = []
    load_plan = DecodeBuffers.load_plan
    monkeypatch.setattr(DecodeBuffers, "load_plan", lambda *a: plans.append(0) or load_plan(*a))
    rng = np.random.default_rng(5)
    common = tokens_of(rng, 64)
    traffic = Traffic()
    for i in range(3):
        traffic.add(0, common + tokens_of(rng, i), 290 + i)
    quick.compare(traffic, graphs=graphs)
    # One for each set of rows, and one or two more for a context of three segments.
    assert 4 <= len(plans) <= 8


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}], ids=["plain", "qk_norm"])
def test_padding_stores_nothing(quick, changes, graphs):
    """Three rows run where four did; the blocks of the fourth stay as they were cached."""
    lab = Lab(quick.device, dataclasses.replace(MODEL, **changes))
    rng = np.random.default_rng(14)
    prompts = [tokens_of(rng, 33 + i) for i in range(4)]
    core = lab.core(True, graphs=graphs)
    traffic = Traffic()
    for i, prompt in enumerate(prompts):
        traffic.add(0, prompt, 3 if i == 3 else 40)
    lab.serve(traffic, core)
    again = Traffic()
    again.add(0, [*prompts[3], 1], 12, "again")
    served = lab.serve(again, core)
    assert served.cached["again"] == 36  # its tail too, copied from the half-filled block
    assert served.tokens["again"] == continuation(lab, [*prompts[3], 1], 12)


@pytest.mark.parametrize("requests", [3, 9])
def test_more_requests_than_rows(quick, requests, graphs):
    """The batch is 2 rows wide; the others queue, and a row's place is taken at once."""
    rng = np.random.default_rng(6)
    traffic = Traffic()
    for i in range(requests):
        traffic.add(0, tokens_of(rng, 3 + i), 2 + i)
    quick.compare(traffic, max_num_seqs=2, graphs=graphs)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_borders_of_blocks(quick, length, graphs):
    """Prompts and outputs that end just before, at and after one; both ends of a request."""
    rng = np.random.default_rng(length)
    traffic = Traffic()
    for i, max_tokens in enumerate((1, 2, 15, 16, 17, 33)):
        traffic.add(i, tokens_of(rng, length), max_tokens)
    quick.compare(traffic, graphs=graphs)


def test_the_longest_context_ends_a_request(quick, graphs):
    traffic = Traffic()
    traffic.add(0, range(30), 34)
    traffic.add(0, range(40), 24)
    traffic.add(2, range(9), 55)
    quick.compare(traffic, max_model_len=64, graphs=graphs)


def continuation(quick, prompt, count):
    """The greedy tokens after a prompt, by the torch backend."""
    traffic = Traffic()
    traffic.add(0, prompt, count, "x")
    return quick.serve(traffic, quick.core(False)).tokens["x"]


@pytest.mark.parametrize("length", [13, 14, 15, 16, 17])
def test_a_stop_while_a_step_runs_ahead_leaves_the_cache_right(quick, length, graphs):
    """The step that ran ahead wrote past the end; the next request takes the full blocks."""
    prompt = tokens_of(np.random.default_rng(8), length)
    answer = continuation(quick, prompt, 40)
    at = next(i for i in range(19, 40) if answer[i] not in answer[:i])
    core = quick.core(True, graphs=graphs)
    first = Traffic()
    first.add(0, prompt, 40, "stops", stop_token_ids=[answer[at]])
    first.add(0, prompt[:3], 40, "goes on")
    served = quick.serve(first, core)
    assert served.tokens["stops"] == answer[: at + 1]
    assert served.finish["stops"] is FinishReason.STOP and served.steps_ahead > at
    again = [*prompt, *answer[: at + 1], 5]
    for follow in (again, again[:-1], prompt + answer[:20], [*again[:-2], 11]):
        second = Traffic()
        second.add(0, follow, 12, f"warm {len(follow)} {follow[-1]}")
        warm = quick.serve(second, core)
        (request_id,) = warm.tokens
        assert warm.cached[request_id] >= 16
        assert warm.tokens[request_id] == continuation(quick, follow, 12)


@pytest.mark.parametrize("min_saved", [32, 128], ids=["shared run", "apart"])
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "simple"])
def test_a_request_that_shares_a_block_as_it_fills(quick, graphs, ahead, min_saved, monkeypatch):
    """It enters, with one token to run, in the step in which another row completes the
    block before: both are decodes, and one reads what the other stores in that step."""
    monkeypatch.setattr("tiny_vllm.attention.items.MIN_SAVED_TOKENS", min_saved)
    prompt = tokens_of(np.random.default_rng(9), 20)
    known = prompt + continuation(quick, prompt, 60)
    traffic = Traffic()
    traffic.add(0, prompt, 30, "first")
    # Step 0 runs the prompt; step j runs position 19 + j, so step 28 fills the third block.
    traffic.add(28, [*known[:48], 7], 12, "second", logprobs=0)
    reference = quick.serve(traffic, quick.core(False))
    served = quick.compare(traffic, reference, ahead=ahead, graphs=graphs)
    assert served.cached["second"] == 48
    mine, its = (
        torch.tensor([next(iter(e.values())).logprob for e in x.logprobs["second"]])
        for x in (served, reference)
    )
    torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "simple"])
def test_a_request_fails_and_its_blocks_are_used_again(device, ahead, monkeypatch, graphs):
    """A token with a NaN embedding comes up in a decode; others go on, even in its blocks."""
    if device.type == "cpu":
        plain_kernels.install(monkeypatch)
    lab = Lab(device)
    rng = np.random.default_rng(10)
    prompts = [tokens_of(rng, n) for n in (18, 25, 7)]
    answers = [continuation(lab, p, 30) for p in prompts]
    used = {t for p, a in zip(prompts[1:], answers[1:], strict=True) for t in p + a}
    at = next(i for i in range(8, 30) if answers[0][i] not in {*prompts[0], *used, *answers[0][:i]})
    lab.nan_tokens = [answers[0][at]]
    traffic = Traffic()
    for i, prompt in enumerate(prompts):
        traffic.add(0, prompt, 30, f"r{i}")
    rest = [t for t in range(VOCAB) if t not in lab.nan_tokens][:50]
    traffic.add(at + 2, rest, 8, "after")
    traffic.add(at + 3, prompts[0], 4, "again")
    served = lab.compare(traffic, ahead=ahead, num_blocks=14, graphs=graphs)
    assert served.finish["r0"] is FinishReason.ERROR
    assert served.tokens["r0"] == answers[0][: at + 1]
    assert served.tokens["r1"] == answers[1]


def test_greedy_and_drawn_rows_in_one_batch(quick, graphs):
    """Draws depend on the seed and the position only; also next to edits and logprobs."""
    prompt = tokens_of(np.random.default_rng(11), 12)
    kinds = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.5, "seed": 2, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.1, "seed": 3, "min_p": 0.1},
    ]
    edited = [{"logprobs": 3}, {"frequency_penalty": 0.5, "temperature": 0.9}]
    for extra in ([], edited):
        traffic = Traffic()
        for i, params in enumerate([*kinds, *extra]):
            traffic.add(i % 3, prompt, 14 + i, **params)
        served = quick.compare(traffic, graphs=graphs)
        assert len({tuple(t[:10]) for t in served.tokens.values()}) > 3
    assert [len(entry) >= 3 for entry in served.logprobs["r5"]] == [True] * 19


def test_the_same_answers_one_at_a_time(quick, graphs):
    """Batched = alone: nothing of a neighbour leaks in through tables or padding."""
    rng = np.random.default_rng(12)
    traffic = Traffic()
    for i in range(7):
        traffic.add(0, tokens_of(rng, 5 * i + 1), 20)
    together = quick.serve(traffic, quick.core(True, graphs=graphs))
    core = quick.core(True, graphs=graphs)
    for arrival in traffic.arrivals:
        alone = quick.serve(Traffic([arrival]), core)
        assert alone.tokens[arrival[1]] == together.tokens[arrival[1]]


def test_warming_up_stores_nothing(quick, graphs):
    core = quick.core(True, warm=True, graphs=graphs)
    backend = core._runner._backend
    assert all((cache == 0).all() for cache in (*backend.keys, *backend.values))
    traffic = small_traffic()
    served = quick.serve(traffic, core)
    assert served.tokens == quick.serve(traffic, quick.core(False)).tokens


def test_kv_bytes_are_those_of_the_torch_backend(quick, graphs):
    """What a step reads, as the roofline counts it; run ahead or not."""
    rng = np.random.default_rng(13)
    common = tokens_of(rng, 160)
    traffic = Traffic()
    for i in range(4):
        traffic.add(0, [*common, i], 20)
    records = {}
    for name, core in (
        ("torch", quick.core(False, max_num_batched_tokens=200)),
        ("ahead", quick.core(True, max_num_batched_tokens=200, graphs=graphs)),
        ("simple", quick.core(True, max_num_batched_tokens=200, ahead=False, graphs=graphs)),
    ):
        for _, request_id, prompt, params in traffic.arrivals:
            core.scheduler.add_request(Request(RequestId(request_id), prompt, params, 20))
        records[name] = []
        while core.scheduler.has_unfinished_requests():
            core.step()
            step = core.last_step
            records[name].append(
                (step.kind, step.kv_bytes.logical, step.attention_context_tokens)
                + ((step.kv_bytes.physical,) if step.kind == "decode" else ())
            )
    assert records["ahead"] == records["simple"]
    assert [r[:3] for r in records["torch"]] == [r[:3] for r in records["ahead"]]
    physical = [r[3] for r in records["ahead"] if r[0] == "decode"]
    per_token = MODEL.kv_bytes_per_token("float32")
    assert all(b - a == 4 * per_token for a, b in pairwise(physical))
    assert physical[0] == (160 + 4 * 2) * per_token
