"""Attention in plain torch over a paged KV cache; the CPU data plane.

K and V of a layer are ``[kv_heads, num_blocks * block_size, head_dim]``: a run of
consecutive blocks is a view, so the common case of a prompt's prefix costs no gather,
and each head streams through memory. They are written before attention, so rows may
read blocks that other rows of the same step fill.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiny_vllm.attention.metadata import AttentionBatch, IntArray, copied_slots
from tiny_vllm.attention.torch_plan import (
    CausalItem,
    Index,
    PlanBuilder,
    RunItem,
    TailItem,
    TorchPlan,
    WindowItem,
)
from tiny_vllm.config import ModelConfig
from tiny_vllm.layers.decoder_layer import Attend
from tiny_vllm.ops.attention import attention_with_lse, merge_partials
from tiny_vllm.ops.memory import copy_slots, lazy_zeros
from tiny_vllm.protocol import BlockCopy, KvBytes


def _take(x: Tensor, index: Index) -> Tensor:
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


def _put(x: Tensor, index: Index, values: Tensor) -> None:
    if isinstance(index, slice):
        x[index].copy_(values)
    else:
        x.index_copy_(0, index, values.to(x.dtype))


@dataclass(slots=True)
class _Parts:
    """Partial results of a layer, flat over [parts x T]."""

    out: Tensor  # [parts * T, kv_heads, group, head_dim]
    lse: Tensor | None  # float32 [parts * T, kv_heads, group]; none where nothing is merged

    def put(self, index: Index, out: Tensor, lse: Tensor) -> None:
        _put(self.out, index, out)
        if self.lse is not None:
            _put(self.lse, index, lse)


class TorchAttention:
    """The torch backend. ``share=False`` is its per-request twin.

    Args:
        config: shape of the model.
        num_blocks, block_size: size of the KV pool.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        share: bool = True,
    ) -> None:
        self._config, self._block_size, self._share = config, block_size, share
        self._dtype, self._device = dtype, device
        self._group = config.num_heads // config.num_kv_heads
        self._scale = config.head_dim**-0.5
        # Zeros, not empty: padded slots are masked, and 0 x NaN would not be.
        shape = (config.num_layers, config.num_kv_heads, num_blocks * block_size, config.head_dim)
        self._caches = lazy_zeros(shape, dtype, device), lazy_zeros(shape, dtype, device)
        self._keys, self._values = (cache.unbind() for cache in self._caches)

    def plan(self, batch: AttentionBatch) -> tuple[Attend, KvBytes]:
        """Plan a step; returns what the decoder calls once a layer."""
        builder = PlanBuilder(batch, self._block_size, self._dtype)
        plan = builder.build(self._share)
        longest = int((batch.num_computed + batch.query_lens).max())
        window = self._config.sliding_window
        if window is not None and longest > window:
            plan.windows = builder.build_windows(window)
        self._to_device(plan)
        per_token = self._config.kv_bytes_per_token(str(self._dtype).split(".")[-1])
        logical = int((batch.num_computed + batch.query_lens).sum())
        return _Step(self, plan).attend, KvBytes(logical * per_token, plan.tokens_read * per_token)

    def _to_device(self, plan: TorchPlan) -> None:
        if self._device.type == "cpu":
            return

        def move(index: Index) -> Index:
            return index if isinstance(index, slice) else index.to(self._device)

        plan.slot_mapping = move(plan.slot_mapping)
        for run in plan.runs:
            run.tokens, run.parts = move(run.tokens), move(run.parts)
            run.slots = move(run.slots)
            run.mask = None if run.mask is None else run.mask.to(self._device)
        for tail in plan.tails:
            tail.tokens, tail.parts = move(tail.tokens), move(tail.parts)
            tail.blocks = tail.blocks.to(self._device)
            tail.mask = None if tail.mask is None else tail.mask.to(self._device)
        for item in plan.windows:
            item.blocks, item.mask = item.blocks.to(self._device), item.mask.to(self._device)

    def write(self, layer: int, slots: Index, k: Tensor, v: Tensor) -> None:
        """Store K and V [T, kv_heads, head_dim] of a step."""
        for cache, values in ((self._keys[layer], k), (self._values[layer], v)):
            if isinstance(slots, slice):
                cache[:, slots].copy_(values.transpose(0, 1))
            else:
                cache.index_copy_(1, slots, values.transpose(0, 1))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `AttentionBackend`."""
        source, target = copied_slots(copies, self._block_size, self._device)
        for cache in self._caches:
            copy_slots(cache, source, target)

    def scrub(self, block_ids: IntArray) -> None:
        """Replace NaN and infinities in some blocks by zero; finite values stay as they are.

        A request that overflowed leaves such values behind, and masking does not stop them.
        """
        slots = block_ids.astype(np.int64)[:, None] * self._block_size
        index = torch.from_numpy((slots + np.arange(self._block_size)).ravel()).to(self._device)
        for cache in (*self._keys, *self._values):
            values = cache.index_select(1, index)
            cache.index_copy_(1, index, values.nan_to_num_(0.0, 0.0, 0.0))

    def read(self, cache: Tensor, slots: Index, length: int) -> Tensor:
        """Slots of a layer's K or V, [kv_heads, length, head_dim].

        A slice of slots is a view; block ids are gathered.
        """
        if isinstance(slots, slice):
            return cache[:, slots.start : slots.start + length]
        heads, _, head_dim = cache.shape
        blocks = cache.view(heads, -1, self._block_size, head_dim).index_select(1, slots)
        return blocks.view(heads, -1, head_dim)[:, :length]

    def run_item(self, layer: int, item: RunItem, q: Tensor, parts: _Parts) -> None:
        """Tokens x one run: the query rows of a KV head are folded into one matrix."""
        n, group, pieces = item.num_tokens, self._group, item.pieces
        heads, head_dim = q.shape[1], q.shape[3]
        rows = _take(q, item.tokens).transpose(0, 1)  # [kv_heads, n, group, head_dim]
        folded = rows.reshape(1, heads, n * group, head_dim)
        k = self.read(self._keys[layer], item.slots, item.padded_length).unsqueeze(0)
        v = self.read(self._values[layer], item.slots, item.padded_length).unsqueeze(0)
        if pieces > 1:
            folded = folded.expand(pieces, -1, -1, -1)
            k = k.view(heads, pieces, -1, head_dim).transpose(0, 1)
            v = v.view(heads, pieces, -1, head_dim).transpose(0, 1)
        out, lse = attention_with_lse(folded, k, v, self._scale, mask=item.mask)
        if pieces > 1:
            out, lse = merge_partials(out, lse)
        out = out.reshape(heads, n, group, head_dim).transpose(0, 1)
        parts.put(item.parts, out, lse.reshape(heads, n, group).transpose(0, 1))

    def run_tails(self, layer: int, item: TailItem, q: Tensor, parts: _Parts) -> None:
        """Private tails of many rows as one padded batch."""
        total = item.num_rows * item.length
        k, v = (
            self.read(cache[layer], item.blocks, total)
            .unflatten(1, (item.num_rows, item.length))
            .transpose(0, 1)
            for cache in (self._keys, self._values)
        )
        out, lse = attention_with_lse(_take(q, item.tokens), k, v, self._scale, mask=item.mask)
        parts.put(item.parts, out, lse)

    def run_causal(self, item: CausalItem, q: Tensor, k: Tensor, v: Tensor, parts: _Parts) -> None:
        """A chunk against itself."""
        rows = q[item.tokens].flatten(1, 2).transpose(0, 1).unsqueeze(0)
        keys = k[item.tokens].transpose(0, 1).unsqueeze(0)
        values = v[item.tokens].transpose(0, 1).unsqueeze(0)
        out, lse = attention_with_lse(rows, keys, values, self._scale, causal=True)
        n, group = rows.shape[2], self._group
        parts.put(
            item.parts,
            out[0].transpose(0, 1).unflatten(1, (-1, group)),
            lse[0].transpose(0, 1).reshape(n, -1, group),
        )

    def run_window(self, layer: int, item: WindowItem, q: Tensor, out: Tensor) -> None:
        """One row under a sliding window."""
        end = item.offset + item.length
        k = self.read(self._keys[layer], item.blocks, end)[:, item.offset :]
        v = self.read(self._values[layer], item.blocks, end)[:, item.offset :]
        rows = q[item.tokens].transpose(0, 1).unsqueeze(0)
        result, _ = attention_with_lse(
            rows, k.unsqueeze(0), v.unsqueeze(0), self._scale, mask=item.mask[None, None]
        )
        out[item.tokens] = result[0].transpose(0, 1)

    def uses_window(self, layer: int, plan: TorchPlan) -> bool:
        """True when the window of this layer hides something in this step."""
        return bool(plan.windows) and self._config.layer_window(layer) is not None


class _Step:
    """One step of a backend: its plan and the buffers all layers share."""

    def __init__(self, backend: TorchAttention, plan: TorchPlan) -> None:
        self._backend, self._plan = backend, plan
        self._parts: _Parts | None = None

    def _buffers(self, q: Tensor) -> _Parts:
        if self._parts is None:
            rows = self._plan.num_parts * self._plan.num_tokens
            out = torch.empty((rows, *q.shape[1:]), dtype=q.dtype, device=q.device)
            lse = None
            if self._plan.num_parts > 1:
                lse = torch.empty((rows, *q.shape[1:3]), dtype=torch.float32, device=q.device)
            if self._plan.sparse and lse is not None:
                out.zero_()
                lse.fill_(-torch.inf)
            self._parts = _Parts(out, lse)
        return self._parts

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> like q."""
        backend, plan = self._backend, self._plan
        backend.write(layer, plan.slot_mapping, k, v)
        if backend.uses_window(layer, plan):
            out = torch.empty_like(q)
            for window in plan.windows:
                backend.run_window(layer, window, q, out)
            return out
        grouped = q.unflatten(1, (k.shape[1], -1))  # [T, kv_heads, group, head_dim]
        parts = self._buffers(grouped)
        for run in plan.runs:
            backend.run_item(layer, run, grouped, parts)
        for tail in plan.tails:
            backend.run_tails(layer, tail, grouped, parts)
        for causal in plan.causal:
            backend.run_causal(causal, grouped, k, v, parts)
        if parts.lse is None:
            return parts.out.view(q.shape)
        shape = (plan.num_parts, plan.num_tokens)
        out, _ = merge_partials(
            parts.out.view(*shape, *q.shape[1:]), parts.lse.view(*shape, q.shape[1])
        )
        return out
