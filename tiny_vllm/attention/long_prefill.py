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

MIN_TOKENS = 4096  # below it the forest kernel is as fast
GRANULE = 1024

logger = get_logger(__name__)


@dataclass(slots=True)
class LongChunk:
    """A row whose chunk runs here: tokens [start, start + length) of the batch."""

    start: int
    length: int
    num_computed: int
    slots: Tensor  # int64, cache slots of positions 0 .. num_computed + length


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

    def warm_up(self, max_tokens: int) -> None:
        """Let cuDNN plan the usual shapes; switches itself off where it cannot run."""
        lengths = range(MIN_TOKENS, min(max_tokens, 2 * MIN_TOKENS) + 1, GRANULE)
        try:
            for length in lengths if self.is_enabled else ():
                q, k = self._empty(length, length)
                attention_cudnn(q, k, k, self._scale, causal=True)
        except RuntimeError as error:
            self.is_enabled = False
            logger.info("long prefills use the forest kernel: cuDNN attention: %s", error)

    def _empty(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        heads, kv_heads, head_dim = (
            self._config.num_heads, self._config.num_kv_heads, self._config.head_dim,
        )  # fmt: skip
        kind = {"dtype": self._dtype, "device": self._device}
        q = torch.zeros((num_queries, heads, head_dim), **kind).transpose(0, 1)[None]
        return q, torch.zeros((1, kv_heads, num_keys, head_dim), **kind)

    def takes(self, batch: AttentionBatch) -> IntArray:
        """bool [B]: rows with a long chunk whose start suits the shapes."""
        if not self.is_enabled:
            return np.zeros(len(batch.num_computed), bool)
        return (batch.query_lens >= MIN_TOKENS) & (batch.num_computed % GRANULE == 0)

    def chunks(self, batch: AttentionBatch, rows: IntArray) -> list[LongChunk]:
        """The chunks of the rows marked in ``rows``."""
        chunks = []
        for row in np.flatnonzero(rows).tolist():
            length, computed = int(batch.query_lens[row]), int(batch.num_computed[row])
            position = np.arange(computed + length)
            blocks = batch.block_tables[row, position // self._block_size].astype(np.int64)
            slots = torch.from_numpy(blocks * self._block_size + position % self._block_size)
            start = int(batch.query_start_loc[row])
            chunks.append(LongChunk(start, length, computed, slots.to(self._device)))
        return chunks

    def run(self, chunk: LongChunk, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """One layer of one chunk.

        Args:
            q, out: [T, heads, head_dim] of the step.
            keys, values: [kv_heads, slots, head_dim], the chunk's own already stored.
        """
        length, first = chunk.length, chunk.num_computed
        padded = -(-length // GRANULE) * GRANULE
        queries, _ = self._empty(padded, 0)
        queries[0, :, :length] = q[chunk.start : chunk.start + length].transpose(0, 1)
        own = chunk.slots[first:]
        k, v = (self._gather(x, own, padded) for x in (keys, values))
        result, lse = attention_cudnn(queries, k, v, self._scale, causal=True)
        if first:
            k, v = (self._gather(x, chunk.slots[:first], first) for x in (keys, values))
            before = attention_cudnn(queries, k, v, self._scale, causal=False)
            result, _ = merge_partials((result, before[0]), (lse, before[1]))
        out[chunk.start : chunk.start + length] = result[0, :, :length].transpose(0, 1)

    def _gather(self, cache: Tensor, slots: Tensor, padded: int) -> Tensor:
        taken = cache.index_select(1, slots)
        if padded > taken.shape[1]:
            taken = torch.nn.functional.pad(taken, (0, 0, 0, padded - taken.shape[1]))
        return taken[None]
