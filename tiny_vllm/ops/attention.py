"""Attention of some query rows over one run of keys, with the log-sum-exp to merge by.

`attention_with_lse` chooses: on a CPU torch's fused kernel (scores in float32, in
cache), or plain matrix products for many rows in bf16; elsewhere the definition.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MANY_ROWS = 256
_CAUSAL_ROWS = 256
_FEW_KEYS = 16
_MAX_SCORES = 1 << 24  # bf16 scores held at a time: 32 MiB, and as much for their softmax


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention and its normaliser.

    Args:
        q: [n, heads, rows, head_dim]; ``heads`` is a multiple of ``kv_heads``.
        k, v: [n, kv_heads, length, head_dim], any strides with a dense last dimension.
        causal: row i sees keys 0..i (rows = length).
        mask: additive, broadcastable to [n, heads, rows, length], in the dtype of ``q``.

    Returns:
        (out [n, heads, rows, head_dim], lse float32 [n, heads, rows]).
    """
    if mask is None and _prefers_products(q):
        compute = _causal_by_blocks if causal else _attention_by_products
        return compute(q, k, v, scale)
    return _fused(q, k, v, scale, causal, mask)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, lse
    return attention_with_lse_plain(q, k, v, scale, causal=causal, mask=mask)


def _prefers_products(q: Tensor) -> bool:
    """True where whole matrix products beat the fused kernel.

    On CPUs with bf16 products the fused kernel runs at float32 speed; from some
    hundred rows on, products with bf16 scores take 0.8 of its time. Their rounding adds
    less than a tenth to the error that bf16 weights and activations have anyway.
    """
    return q.device.type == "cpu" and q.dtype is torch.bfloat16 and q.shape[2] >= _MANY_ROWS


def _causal_by_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A causal square as blocks of rows: each against the keys before it, and itself."""
    n, heads, rows, head_dim = q.shape
    outs, lses = [], []
    for start in range(0, rows, _CAUSAL_ROWS):
        block = slice(start, start + _CAUSAL_ROWS)
        queries = q[:, :, block]
        out, lse = _fused(queries, k[:, :, block], v[:, :, block], scale, True, None)
        if start:
            folded = queries.reshape(n, k.shape[1], -1, head_dim)
            past = attention_with_lse(folded, k[:, :, :start], v[:, :, :start], scale)
            parts = (past[0].reshape(out.shape), out), (past[1].reshape(lse.shape), lse)
            out, lse = merge_partials(*parts)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _attention_by_products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    n, heads, rows, head_dim = q.shape
    length = k.shape[2]
    queries = q.reshape(n * heads, rows, head_dim)
    keys = k.reshape(n * heads, length, head_dim).transpose(1, 2)
    values = v.reshape(n * heads, length, head_dim)
    step = max(_MANY_ROWS, _MAX_SCORES // (n * heads * length))
    parts = [_products(part, keys, values, scale) for part in queries.split(step, 1)]
    if len(parts) == 1:
        out, lse = parts[0]
    else:
        out, lse = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
    return out.view(q.shape), lse.view(n, heads, rows)


def _products(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[b, rows, d] x [b, d, length] x [b, length, d] -> ([b, rows, d], lse [b, rows])."""
    scores = torch.baddbmm(queries.new_empty(1), queries, keys, beta=0, alpha=scale)
    probs = torch.softmax(scores, -1)
    # Any key gives the normaliser, probability = exp(score - lse), unless its probability
    # underflows: the best of the first few, and of all where those are too small.
    lse = _normaliser(scores[..., :_FEW_KEYS], probs[..., :_FEW_KEYS])
    if not bool(lse.isfinite().all()):
        lse = _normaliser(scores, probs)
    return torch.bmm(probs, values), lse


def _normaliser(scores: Tensor, probs: Tensor) -> Tensor:
    return scores.amax(-1).float() - probs.amax(-1).float().log_()


def attention_with_lse_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, in float32."""
    n, heads, rows, head_dim = q.shape
    group = heads // k.shape[1]
    grouped = q.float().reshape(n, k.shape[1], group, rows, head_dim)
    scores = grouped @ k.float().unsqueeze(2).transpose(-1, -2) * scale
    scores = scores.reshape(n, heads, rows, k.shape[2])
    if causal:
        upper = torch.ones(rows, k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(upper, float("-inf"))
    if mask is not None:
        scores = scores + mask.float()
    lse = torch.logsumexp(scores, -1)
    probs = (scores - lse.unsqueeze(-1)).exp().reshape(n, k.shape[1], group * rows, k.shape[2])
    out = probs @ v.float()
    return out.reshape(n, heads, rows, head_dim).to(q.dtype), lse


def merge_partials(
    out: Tensor | Sequence[Tensor], lse: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint runs of keys, by their log-sum-exp.

    Args:
        out: parts of [..., head_dim]; part 0 is present for every row.
        lse: float32 parts of [...]; -inf where a row has no such part.

    Returns:
        (out [..., head_dim], lse [...]).
    """
    merged, total = out[0], lse[0]
    for part, part_lse in zip(out[1:], lse[1:], strict=True):
        weight = torch.sigmoid(part_lse - total).unsqueeze(-1).to(merged.dtype)
        merged = torch.lerp(merged, part, weight)
        total = torch.logaddexp(total, part_lse)
    return merged, total
