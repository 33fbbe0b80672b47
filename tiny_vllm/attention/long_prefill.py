"""Long prefill chunks through cuDNN's attention, where that beats the forest kernel.

A chunk meets itself (causal) and, if it continues a prompt, what came before it (unmasked);
the two are merged by log-sum-exp. cuDNN plans anew for every shape, some 40 ms each, so
lengths are rounded up to few shapes: padded queries are dropped, and padded keys lie after
all real ones, where causality hides them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiny_vllm.attention.metadata import AttentionBatch, IntArray
from tiny_vllm.config import ModelConfig
from tiny_vllm.logger import get_logger
from tiny_vllm.ops.attention import attention_cudnn, merge_partials
from tiny_vllm.ops.memory import to_device

MIN_TOKENS = 4096  # below it the forest kernel is as fast
GRANULE = 1024

logger = get_logger(__name__)


@dataclass(slots=True)
class LongChunk:
    """A row whose chunk runs here: tokens [start, start + length) of the batch."""

    start: int
    length: int
    num_computed: int
    slots: Tensor | slice  # cache slots of positions 0 .. num_computed + length


class LongPrefill:
    """Decides which rows run here and runs them.

    Args:
        dtype, device: of the KV pool.
    """

    def __init__(
        self, config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._block_size, self._device = config, block_size, device
        self._scale = config.head_dim**-0.5
        self.is_enabled = (
            device.type == "cuda"
            and dtype in (torch.float16, torch.bfloat16)
            and config.head_dim in (64, 128)
            and config.sliding_window is None
        )
        self._dtype = dtype

    def warm_up(self, max_tokens: int, keys: Tensor) -> None:
        """Let cuDNN plan the usual shapes; switches itself off where it cannot run.

        Args:
            keys: one layer of the pool, whose strides are part of a plan.
        """
        longest = min(max_tokens, keys.shape[1], 2 * MIN_TOKENS)
        try:
            for length in range(MIN_TOKENS, longest + 1, GRANULE) if self.is_enabled else ():
                q, _ = self._empty(length, 0)
                k = keys[None, :, :length]
                attention_cudnn(q, k, k, self._scale, causal=True)
        except RuntimeError as error:
            self.is_enabled = False
            logger.info("long prefills use the forest kernel: cuDNN attention: %s", error)

    def _empty(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        heads, kv_heads, head_dim = (
            self._config.num_heads, self._config.num_kv_heads, self._config.head_dim,
        )  # fmt: skip

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)

        q = zeros(num_queries, heads, head_dim).transpose(0, 1)[None]
        return q, zeros(1, kv_heads, num_keys, head_dim)

    def takes(self, batch: AttentionBatch) -> IntArray:
        """bool [B]: rows with a long chunk whose start suits the shapes."""
        if not self.is_enabled:
            return np.zeros(len(batch.num_computed), bool)
        return (batch.query_lens >= MIN_TOKENS) & (batch.num_computed % MIN_TOKENS == 0)

    def chunks(self, batch: AttentionBatch, rows: IntArray) -> list[LongChunk]:
        """The chunks of the rows marked in ``rows``."""
        chunks = []
        for row in np.flatnonzero(rows).tolist():
            length, computed = int(batch.query_lens[row]), int(batch.num_computed[row])
            position = np.arange(computed + length)
            blocks = batch.block_tables[row, position // self._block_size].astype(np.int64)
            slots = blocks * self._block_size + position % self._block_size
            begin = int(slots[0])
            if (slots == begin + position).all():  # a view then, no copy
                place: Tensor | slice = slice(begin, begin + len(slots))
            else:
                place = to_device(slots, self._device)
            start = int(batch.query_start_loc[row])
            chunks.append(LongChunk(start, length, computed, place))
        return chunks

    def run(self, chunk: LongChunk, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """One layer of one chunk.

        Args:
            q, out: [T, heads, head_dim] of the step.
            keys, values: [kv_heads, slots, head_dim], the chunk's own already stored.
        """
        length, first = chunk.length, chunk.num_computed
        padded = -(-length // GRANULE) * GRANULE
        queries = q[chunk.start : chunk.start + length].transpose(0, 1)[None]
        if padded > length:
            whole, _ = self._empty(padded, 0)
            whole[:, :, :length] = queries
            queries = whole
        k, v = (self._take(x, chunk.slots, first, first + length, padded) for x in (keys, values))
        result, lse = attention_cudnn(queries, k, v, self._scale, causal=True)
        if first:
            k, v = (self._take(x, chunk.slots, 0, first, first) for x in (keys, values))
            before = attention_cudnn(queries, k, v, self._scale, causal=False)
            result, _ = merge_partials((result, before[0]), (lse, before[1]))
        out[chunk.start : chunk.start + length] = result[0, :, :length].transpose(0, 1)

    def _take(
        self, cache: Tensor, slots: Tensor | slice, begin: int, end: int, padded: int
    ) -> Tensor:
        """Positions begin .. end of a row, [1, kv_heads, padded, head_dim], zeros at the end."""
        if isinstance(slots, slice):
            taken = cache[:, slots.start + begin : slots.start + end]
        else:
            taken = cache.index_select(1, slots[begin:end])
        if padded > end - begin:
            taken = torch.nn.functional.pad(taken, (0, 0, 0, padded - (end - begin)))
        return taken[None]
