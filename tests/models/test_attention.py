"""The forest planner and the torch backend against attention written out per token."""

import numpy as np
import pytest
import torch

from tiny_vllm.attention.metadata import AttentionBatch
from tiny_vllm.attention.planner import build_forest
from tiny_vllm.attention.torch_backend import TorchAttention
from tiny_vllm.config import ModelConfig
from tiny_vllm.ops.attention import attention_with_lse, attention_with_lse_plain

BLOCK = 4


def model(heads=6, kv_heads=2, head_dim=16, window=None):
    return ModelConfig(
        architecture="test",
        vocab_size=8,
        hidden_size=heads * head_dim,
        intermediate_size=8,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=window,
    )


def random_tree_batch(rng, num_rows, num_blocks=400):
    """Rows whose block tables branch like a prefix tree; ragged contexts and chunks."""
    free = iter(rng.permutation(num_blocks).tolist())
    tables: list[list[int]] = []
    for _ in range(num_rows):
        if tables and rng.random() < 0.8:
            parent = tables[rng.integers(len(tables))]
            table = list(parent[: rng.integers(len(parent) + 1)])
        else:
            table = []
        table += [next(free) for _ in range(rng.integers(1, 12))]
        tables.append(table)
    width = max(map(len, tables))
    padded = np.full((num_rows, width), -1, dtype=np.int32)
    lens, computed = [], []
    for i, table in enumerate(tables):
        padded[i, : len(table)] = table
        # the last block is this row's own: its new tokens must not clash with others'
        length = (len(table) - 1) * BLOCK + int(rng.integers(1, BLOCK + 1))
        private = length - (len(table) - 1) * BLOCK
        count = int(rng.integers(1, private + 1)) if rng.random() < 0.5 else 1
        lens.append(count)
        computed.append(length - count)
    return AttentionBatch(np.concatenate(([0], np.cumsum(lens))), np.array(computed), padded)


def reference(config, batch, keys, values, q, window=None):
    """Attention of every token over its own context, one token at a time."""
    positions, out = batch.positions(), torch.empty_like(q)
    rows = np.repeat(np.arange(len(batch.num_computed)), batch.query_lens)
    group = config.num_heads // config.num_kv_heads
    for t, (row, position) in enumerate(zip(rows, positions, strict=True)):
        seen = np.arange(0 if window is None else max(0, position - window + 1), position + 1)
        slots = batch.block_tables[row, seen // BLOCK].astype(np.int64) * BLOCK + seen % BLOCK
        k = keys[:, slots].transpose(0, 1).repeat_interleave(group, 1)
        v = values[:, slots].transpose(0, 1).repeat_interleave(group, 1)
        scores = torch.einsum("hd,shd->hs", q[t], k) * config.head_dim**-0.5
        out[t] = torch.einsum("hs,shd->hd", scores.softmax(-1), v)
    return out


def run_backend(config, batch, share, seed=0):
    """Run one layer on a pool of random KV; returns (backend, q, result, bytes)."""
    generator = torch.Generator().manual_seed(seed)
    backend = TorchAttention(config, 400, BLOCK, torch.float32, torch.device("cpu"), share=share)
    backend._keys[0].normal_(generator=generator)
    backend._values[0].normal_(generator=generator)
    tokens = batch.num_tokens
    q = torch.randn(tokens, config.num_heads, config.head_dim, generator=generator)
    k = torch.randn(tokens, config.num_kv_heads, config.head_dim, generator=generator)
    v = torch.randn(tokens, config.num_kv_heads, config.head_dim, generator=generator)
    attend, kv_bytes = backend.plan(batch)
    return backend, q, attend(0, q, k, v).clone(), kv_bytes


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_random_forests_equal_the_definition(seed, share, monkeypatch):
    monkeypatch.setattr("tiny_vllm.attention.torch_plan.MIN_SAVED_TOKENS", 4)
    monkeypatch.setattr("tiny_vllm.attention.torch_plan.MIN_PIECE_TOKENS", 3)
    monkeypatch.setattr("tiny_vllm.attention.torch_plan.SHORT_TAIL_TOKENS", 8)
    rng = np.random.default_rng(seed)
    batch = random_tree_batch(rng, int(rng.integers(1, 24)))
    backend, q, out, _ = run_backend(model(), batch, share, seed)
    expected = reference(model(), batch, backend._keys[0], backend._values[0], q)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_sliding_window_equals_the_definition(seed):
    config = model(window=9)
    batch = random_tree_batch(np.random.default_rng(seed), 8)
    backend, q, out, _ = run_backend(config, batch, True, seed)
    expected = reference(config, batch, backend._keys[0], backend._values[0], q, window=9)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(30))
def test_every_block_is_covered_exactly_once(seed):
    rng = np.random.default_rng(seed)
    batch = random_tree_batch(rng, int(rng.integers(1, 40)))
    full = (batch.num_computed + 1) // BLOCK
    forest = build_forest(batch.block_tables, full, BLOCK, int(rng.integers(1, 64)))
    for row in range(len(full)):
        covered = []
        for run in forest.runs:
            if row in run.rows:
                assert run.level * 1 == sum(
                    r.first_block < run.first_block and row in r.rows for r in forest.runs
                )
                table = batch.block_tables[row, run.first_block :][: len(run.block_ids)]
                assert table.tolist() == run.block_ids.tolist()
                covered += range(run.first_block, run.first_block + len(run.block_ids))
        assert sorted(covered) == list(range(forest.tail_start[row]))
        assert forest.tail_start[row] <= full[row]


def test_shared_prefix_is_read_once():
    """16 decodes over 64 common blocks: physical bytes = common once + private tails."""
    tables = np.zeros((16, 66), dtype=np.int32)
    tables[:, :64] = np.arange(64)
    tables[:, 64:] = 64 + np.arange(32).reshape(16, 2)
    batch = AttentionBatch(np.arange(17), np.full(16, 66 * BLOCK - 1), tables)
    config = model()
    _, _, _, kv_bytes = run_backend(config, batch, True)
    per_token = config.kv_bytes_per_token("float32")
    assert kv_bytes.logical == 16 * 66 * BLOCK * per_token
    assert kv_bytes.physical == (64 + 16 * 2) * BLOCK * per_token
    _, _, _, alone = run_backend(config, batch, False)
    assert alone.physical == alone.logical == kv_bytes.logical


def test_rows_of_one_step_may_read_each_others_blocks():
    """Row 1 reads blocks that row 0 fills in the same step."""
    tables = np.array([[0, 1, 2], [0, 1, 3]], dtype=np.int32)
    batch = AttentionBatch(np.array([0, 9, 10]), np.array([0, 8]), tables)
    backend, q, out, _ = run_backend(model(), batch, True)
    expected = reference(model(), batch, backend._keys[0], backend._values[0], q)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_fused_kernel_equals_the_definition(causal, masked):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 6, 17, 32, generator=generator)
    k = torch.randn(2, 2, 17, 32, generator=generator)
    v = torch.randn(2, 2, 17, 32, generator=generator)
    mask = None
    if masked:
        mask = torch.zeros(2, 1, 1, 17)
        mask[1, ..., 11:] = -torch.inf
    fast = attention_with_lse(q, k, v, 0.2, causal=causal, mask=mask)
    plain = attention_with_lse_plain(q, k, v, 0.2, causal=causal, mask=mask)
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_large_scores_in_bf16_keep_their_precision():
    """Keys that lean towards the query give large scores, where one bf16 step is 0.25."""
    generator = torch.Generator().manual_seed(2)
    lean = torch.randn(1, 1, 1, 64, generator=generator) * 2
    q = (torch.randn(1, 1, 300, 64, generator=generator) + lean).bfloat16()
    k = (torch.randn(1, 1, 500, 64, generator=generator) + lean).bfloat16()
    v = torch.randn(1, 1, 500, 64, generator=generator).bfloat16()
    out, lse = attention_with_lse(q, k, v, 0.125)
    expected, expected_lse = attention_with_lse_plain(q, k, v, 0.125)
    assert expected_lse.min() > 20
    torch.testing.assert_close(lse, expected_lse, rtol=0.0, atol=1e-3)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.02, atol=0.02)


def test_scrub_mends_only_what_is_not_finite():
    config = model()
    backend = TorchAttention(config, 4, BLOCK, torch.float32, torch.device("cpu"))
    backend._keys[0].fill_(2.0)
    backend._keys[0][0, BLOCK] = torch.nan
    backend._values[0][1, 2 * BLOCK] = torch.inf
    backend.scrub(np.array([1, 2], dtype=np.int32))
    assert torch.isfinite(backend._keys[0]).all() and torch.isfinite(backend._values[0]).all()
    assert (backend._keys[0][1] == 2.0).all()
