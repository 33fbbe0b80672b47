"""200 random requests on the real small model, in a pool that is too small: as the baseline."""

import random

import pytest

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.extended import ExtendedEngine
from tiny_vllm.origin import OriginEngine
from tiny_vllm.sampling_params import SamplingParams

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_REQUESTS = 200
SETTINGS = {"model": "smollm2-135m", "dtype": "float32", "device": "cpu", "max_model_len": 128}


def random_requests(rng):
    """Prompts that begin as one of four documents, cut anywhere, or as an earlier prompt."""
    documents = [[rng.randrange(2000, 40000) for _ in range(90)] for _ in range(4)]
    requests = []
    for _ in range(NUM_REQUESTS):
        stem = rng.choice(documents if rng.random() < 0.8 or not requests else requests[-20:])
        stem = stem[0] if isinstance(stem, tuple) else stem
        tail = [rng.randrange(2000, 40000) for _ in range(rng.randrange(1, 5))]
        requests.append(([*stem[: rng.randrange(len(stem))], *tail], rng.choice([1, 1, 2, 3, 6])))
    return requests


def serve(engine, requests, rng):
    """Arrivals spread over the steps; token ids by request."""
    tokens, waiting = {}, [*enumerate(requests)]
    while waiting or engine.has_unfinished_requests():
        for index, (prompt, length) in waiting[: rng.randrange(4)]:
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            engine.add_request(str(index), prompt, params)
            waiting.pop(0)
        for output in engine.step():
            assert output.error is None
            if output.finished:
                tokens[output.request_id] = output.outputs[0].token_ids
    engine.ledger.check()
    return tokens


def test_random_requests_equal_the_baseline():
    """With blocks of 16 tokens and of 64, of which hardly one is ever full."""
    requests = random_requests(random.Random(3))
    origin = OriginEngine.build(EngineConfig.create(**SETTINGS, max_num_seqs=8))
    expected = serve(origin, requests, random.Random(0))
    origin.shutdown()
    for block_size, num_blocks in ((16, 22), (64, 7)):
        config = EngineConfig.create(
            **SETTINGS,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=100,
            debug_checks=True,
        )
        engine = ExtendedEngine.build(config)
        assert serve(engine, requests, random.Random(block_size)) == expected
        ledger = engine.ledger
        assert ledger.missed_evicted > 500 and ledger.copied_tokens > 500
        assert ledger.cached_tokens > ledger.copied_tokens
        engine.shutdown()
