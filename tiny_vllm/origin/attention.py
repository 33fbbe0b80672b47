"""Attention of the baseline: torch's scaled_dot_product_attention on contiguous slots.

One object per step; the decoder calls it once a layer. `PrefillAttention` runs a whole
prompt into an empty slot, `DecodeAttention` one token of each of the first n slots.
"""

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tiny_vllm.config import ModelConfig
from tiny_vllm.origin.kv_cache import ContiguousKvCache

# Without cuDNN: it plans anew for every length, and each decode step has a new one (60 ms
# against 12 ms a step, 1B model in bf16 on an H200).
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_QUERY_CHUNK = 1024  # queries per masked call: a sliding window needs no [T, T] mask then


def kernels() -> AbstractContextManager[None]:
    """The attention kernels to choose from; a forward pass runs inside."""
    return sdpa_kernel(_KERNELS)


class PrefillAttention:
    """A prompt of T tokens attends to itself and fills slot ``slot``."""

    def __init__(self, cache: ContiguousKvCache, model: ModelConfig, slot: int) -> None:
        self._cache, self._model, self._slot = cache, model, slot

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim]; k, v [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        length = q.shape[0]
        self._cache.keys[layer][self._slot, :, :length] = k.transpose(0, 1)
        self._cache.values[layer][self._slot, :, :length] = v.transpose(0, 1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, head_dim]
        window = self._model.layer_window(layer)
        if window is None or window >= length:
            out = _attend(q, k, v, is_causal=True)
        else:
            out = _windowed(q, k, v, window)
        return out[0].transpose(0, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Grouped-query attention in a fused kernel. q [1, heads, Q, head_dim], k, v by KV heads."""
    if q.is_cuda:  # most fused CUDA kernels take no grouped heads; the copy is short-lived
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, enable_gqa=not q.is_cuda
    )


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    length = q.shape[2]
    chunks = []
    for start in range(0, length, _QUERY_CHUNK):
        stop = min(start + _QUERY_CHUNK, length)
        first = max(0, start - window + 1)
        query = torch.arange(start, stop, device=q.device)[:, None]
        key = torch.arange(first, stop, device=q.device)
        mask = _additive((key <= query) & (key > query - window), q.dtype)
        part = slice(first, stop)
        chunks.append(_attend(q[:, :, start:stop], k[:, :, part], v[:, :, part], mask))
    return torch.cat(chunks, dim=2)


def _additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """A float mask: the fused kernels take it as it is."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(
        ~keep, float("-inf")
    )


class DecodeAttention:
    """One new token of each of the slots 0..n-1.

    The query heads of a KV head are laid out as query rows: the fused kernels then read
    each KV head once for its whole group, where ``enable_gqa`` reads it once per query head.

    Args:
        lengths: tokens of each slot with the new one; its KV goes to the last place.
    """

    def __init__(self, cache: ContiguousKvCache, model: ModelConfig, lengths: list[int]) -> None:
        device = cache.keys[0].device
        self._cache, self._model = cache, model
        self._longest = max(lengths)
        self._lengths = torch.tensor(lengths, device=device)
        self._is_ragged = min(lengths) != self._longest
        self._slots = torch.arange(len(lengths), device=device)
        # What a layer with this window reads; built once for all layers.
        windows = {model.layer_window(layer) for layer in range(model.num_layers)}
        self._spans = {window: self._span(lengths, window) for window in windows}

    def _span(self, lengths: list[int], window: int | None) -> tuple[slice, Tensor | None]:
        """The places that are read and the mask over them, [n, 1, 1, places] or None."""
        first = 0 if window is None else max(0, min(lengths) - window)
        stop = self._longest
        if not self._is_ragged:
            return slice(first, stop), None
        # Masked kernels want rows of a multiple of 8; what lies beyond is masked as well.
        stop = min(self._cache.max_len, first + (stop - first + 7) // 8 * 8)
        place = torch.arange(first, stop, device=self._lengths.device)
        keep = place < self._lengths[:, None]
        if window is not None:
            keep &= place >= self._lengths[:, None] - window
        return slice(first, stop), _additive(keep, self._cache.keys[0].dtype)[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, head_dim]; k, v [n, kv_heads, head_dim] -> [n, heads, head_dim]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._slots, :, self._lengths - 1] = k
        values[self._slots, :, self._lengths - 1] = v
        places, mask = self._spans[self._model.layer_window(layer)]
        num_rows, num_heads, head_dim = q.shape
        grouped = q.reshape(num_rows, k.shape[1], num_heads // k.shape[1], head_dim)
        key, value = (x[:num_rows, :, places] for x in (keys, values))
        out = F.scaled_dot_product_attention(grouped, key, value, mask)
        return out.reshape(num_rows, num_heads, head_dim)
