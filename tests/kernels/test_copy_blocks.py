"""Copies of the beginnings of blocks, in both attention backends, against numpy."""

import numpy as np
import pytest
import torch

from tests.models.test_attention import model
from tiny_vllm.attention.torch_backend import TorchAttention
from tiny_vllm.attention.triton_backend import TritonAttention
from tiny_vllm.protocol import BlockCopy

NUM_BLOCKS = 24
BACKENDS = [TorchAttention, TritonAttention]


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "triton"])
def test_copies_equal_numpy(backend, block_size, dtype, device):
    """Other slots of a target stay poisoned, other blocks stay as they were."""
    rng = np.random.default_rng(block_size)
    attention = backend(model(), NUM_BLOCKS, block_size, dtype, device)
    expected = []
    for cache in attention._caches:
        cache.copy_(torch.from_numpy(rng.standard_normal(cache.shape)).to(cache))
        expected.append(cache.float().cpu().numpy().copy())
    blocks = rng.permutation(NUM_BLOCKS)
    # one source may serve several requests of a step
    sources, targets = [*blocks[:6].tolist(), int(blocks[0])], blocks[6:13].tolist()
    lengths = [1, block_size - 1, *rng.integers(1, block_size, 5).tolist()]
    copies = [BlockCopy(*one) for one in zip(sources, targets, lengths, strict=True)]
    for values in expected:
        before = values.copy()
        for copy in copies:
            source, target = copy.source * block_size, copy.target * block_size
            n = copy.num_tokens
            values[:, :, target : target + n] = before[:, :, source : source + n]
    attention.copy_blocks(copies)
    for cache, values in zip(attention._caches, expected, strict=True):
        assert np.array_equal(cache.float().cpu().numpy(), values)


@pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "triton"])
def test_a_block_that_is_source_and_target_is_read_first(backend, device):
    """A source that is given away in the same step is copied as it was before."""
    attention = backend(model(), 4, 16, torch.float32, device)
    keys = attention._caches[0]
    keys.copy_(torch.arange(4, device=device).repeat_interleave(16)[:, None].expand_as(keys))
    attention.copy_blocks([BlockCopy(0, 1, 15), BlockCopy(1, 2, 15)])
    assert keys[0, 0, 16:31].eq(0).all()
    assert keys[0, 0, 32:47].eq(1).all()
