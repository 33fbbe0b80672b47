"""Attention of some query rows over one run of keys, with the log-sum-exp to merge by.

`attention_with_lse` hands over to torch's fused kernel on a CPU, which keeps scores in
float32 and in cache, and is the plain definition elsewhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


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
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, lse
    return attention_with_lse_plain(q, k, v, scale, causal=causal, mask=mask)


def attention_cudnn(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """`attention_with_lse` by cuDNN, for long rows in 16 bits on a GPU.

    Raises:
        RuntimeError: cuDNN has no kernel for these shapes or this GPU.
    """
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.squeeze(-1)


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
