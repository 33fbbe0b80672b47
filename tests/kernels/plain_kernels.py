"""Kernels of the data plane in plain torch: the interpreter would take a second for a step.

They read and write the same device state, item by item, so that a wrong plan, a stale
table or a wrong slot gives wrong numbers here too.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.attention.items import OPEN_END
from tiny_vllm.ops.norm import rms_norm


def _turn(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d] rotated; ``sin`` is signed."""
    at = positions.clamp(min=0).long()
    return x * cos[at][:, None] + x.roll(x.shape[-1] // 2, -1) * sin[at][:, None]


def forest_attention(
    q, k_cache, v_cache, out, parts, items, counts, q_index, positions, part_start, block_table,
    *, scale, block_size, block_m, class_index, num_programs, config, window=None, rotate=None,
    pdl=False,
):  # fmt: skip
    """See `tiny_vllm.ops.kernels.attention`; items run at once, so none reads what one stores."""
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[0]
    if rotate is not None:
        all_heads = q.as_strided((tokens, heads + 2 * kv_heads, dim), (q.stride(0), dim, 1))
        turned = _turn(all_heads[:, :-kv_heads], positions, *rotate)
        q, newest = turned[:, :heads], (turned[:, heads:], all_heads[:, -kv_heads:])
    stores = []
    for row, begin, end, q_begin, q_count, part, is_final, _ in items[
        : int(counts[class_index])
    ].tolist():
        assert q_count * (heads // kv_heads) <= block_m
        members = q_index[q_begin : q_begin + q_count].tolist()
        last = max(int(positions[token]) for token in members)
        for token in members:
            position = int(positions[token])
            stop = min(end, position + 1, last + (rotate is None))
            start = begin if window is None else max(begin, position - window + 1)
            at = torch.arange(start, max(start, stop))
            slots = block_table[row, at // block_size].long() * block_size + at % block_size
            k, v = k_cache[:, slots], v_cache[:, slots]
            if rotate is not None and end == OPEN_END:
                own = [x[token][:, None] for x in newest]
                k, v = torch.cat((k, own[0]), 1), torch.cat((v, own[1]), 1)
                block = int(block_table[row, position // block_size])
                stores.append((block * block_size + position % block_size, own))
            grouped = q[token].unflatten(0, (kv_heads, -1))
            scores = torch.einsum("hgd,hnd->hgn", grouped, k) * scale
            result = torch.einsum("hgn,hnd->hgd", scores.softmax(-1), v).flatten(0, 1)
            if is_final:
                out[token] = result
            else:
                slot = int(part_start[token]) + part
                parts[0][slot] = result
                parts[1][slot] = scores.logsumexp(-1).flatten() / math.log(2)
    for slot, (k, v) in stores:
        k_cache[:, slot : slot + 1], v_cache[:, slot : slot + 1] = k, v


def merge_parts(parts, part_start, out, *, pdl=False):
    """See `tiny_vllm.ops.kernels.attention`."""
    bounds = part_start.tolist()
    for token in range(len(out)):
        span = slice(bounds[token], bounds[token + 1])
        if span.start < span.stop:
            weight = (parts[1][span] * math.log(2)).softmax(0)
            out[token] = (weight[..., None] * parts[0][span]).sum(0)


def rotary_store(
    qkv, positions, rows, block_table, cos, sin, k_cache, v_cache,
    *, num_heads, block_size, q_norm=None, k_norm=None, eps=0.0, out=None, pdl=False,
):  # fmt: skip
    """See `tiny_vllm.ops.kernels.rotary`."""
    kv_heads, _, dim = k_cache.shape
    heads = qkv.unflatten(1, (num_heads + 2 * kv_heads, dim))
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), 1)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = (_turn(x, positions, cos, sin) for x in (q, k))
    live = (positions >= 0).nonzero()[:, 0]
    at = positions[live].long()
    blocks = block_table[rows[live].long(), at // block_size].long()
    slots = blocks * block_size + at % block_size
    k_cache[:, slots], v_cache[:, slots] = k[live].transpose(0, 1), v[live].transpose(0, 1)
    return q * (positions >= 0)[:, None, None]


def greedy(logits, out_ids, out_peaks, *, advance=None, workspace=None):
    """See `tiny_vllm.ops.kernels.sample`."""
    ids = logits.argmax(-1)
    out_ids.copy_(ids)
    out_peaks.copy_(logits.gather(1, ids[:, None])[:, 0])
    if advance is not None:
        live = advance.positions >= 0
        advance.token_ids.copy_(torch.where(live, ids, advance.token_ids))
        advance.positions.add_(live)


def silu_mul(x, **_):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put them in place of the kernels."""
    place = "tiny_vllm.attention.triton_backend"
    monkeypatch.setattr(f"{place}.forest_attention", forest_attention)
    monkeypatch.setattr(f"{place}.merge_parts", merge_parts)
    monkeypatch.setattr(f"{place}.rotary_store", rotary_store)
    monkeypatch.setattr("tiny_vllm.worker.decode_loop.greedy", greedy)
    place = "tiny_vllm.layers.fused_layer"
    monkeypatch.setattr(f"{place}.rms_norm", lambda x, w, eps, pdl=False: rms_norm(x, w, eps))
    monkeypatch.setattr(f"{place}.silu_mul", silu_mul)
    monkeypatch.setattr(f"{place}.MAX_SKINNY_ROWS", 0)
