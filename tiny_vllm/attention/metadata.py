"""What a backend needs to know of a step, and the protocol backends implement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiny_vllm.layers.decoder_layer import Attend, FusedAttend
from tiny_vllm.ops.memory import to_device
from tiny_vllm.protocol import BlockCopy, KvBytes

IntArray = npt.NDArray[np.integer]


@dataclass(slots=True)
class AttentionBatch:
    """The rows of a flat batch, in order.

    Attributes:
        query_start_loc: int64 [B + 1], row i owns tokens [loc[i], loc[i+1]).
        num_computed: int64 [B], tokens whose KV is in the cache before the step.
        block_tables: int32 [B, width]; entries past a row's blocks are ignored.
    """

    query_start_loc: IntArray
    num_computed: IntArray
    block_tables: IntArray

    @property
    def query_lens(self) -> IntArray:
        return np.diff(self.query_start_loc)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    def positions(self) -> IntArray:
        """Position of every token, int64 [T]."""
        lens = self.query_lens
        return np.arange(self.num_tokens) + np.repeat(
            self.num_computed - self.query_start_loc[:-1], lens
        )

    def slot_mapping(self, block_size: int) -> IntArray:
        """Cache slot of every token, int64 [T]."""
        positions = self.positions()
        rows = np.repeat(np.arange(len(self.num_computed)), self.query_lens)
        blocks = self.block_tables[rows, positions // block_size].astype(np.int64)
        return blocks * block_size + positions % block_size


class AttentionBackend(Protocol):
    """Owns the KV tensors. ``plan`` once a step, then ``attend`` once a layer."""

    def plan(self, batch: AttentionBatch) -> tuple[Attend | FusedAttend, KvBytes]:
        """Return the function the decoder calls in each layer, and the bytes it reads."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the beginnings of blocks, all at once and before the step that reads them."""
        ...

    def scrub(self, block_ids: IntArray) -> None:
        """Make the values in some blocks finite, after a request failed on them."""
        ...


def copied_slots(
    copies: Sequence[BlockCopy], block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Slots to copy from and to, int64 [tokens of all copies]."""
    pairs = [
        np.arange(copy.num_tokens) + np.array([[copy.source], [copy.target]]) * block_size
        for copy in copies
    ]
    source, target = to_device(np.concatenate(pairs, axis=1).astype(np.int64), device)
    return source, target
