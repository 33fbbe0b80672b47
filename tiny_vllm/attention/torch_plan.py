"""From a forest to items the torch backend runs: which query tokens meet which slots.

An item's result goes to part ``level`` of each of its tokens; parts are merged last.
Rows with one query token read [0, position]; longer rows (prefill chunks) read the
cache up to their first position and see their own chunk through a causal item.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tiny_vllm.attention.metadata import AttentionBatch, IntArray
from tiny_vllm.attention.planner import (
    MIN_SAVED_TOKENS,
    NEVER_SHARE,
    Forest,
    build_forest,
)

SHORT_TAIL_TOKENS = 256  # shorter private tails of decodes are gathered and run together
FEW_TOKENS = 4  # a run is read in pieces for at most so many query tokens
MIN_PIECE_TOKENS = 512
PIECES = 2

Index = slice | Tensor  # a slice where tokens or slots are consecutive, else int64 indices


@dataclass(slots=True)
class RunItem:
    """Tokens that all see the same run of cache slots.

    The run is read in ``pieces`` of equal length, so that few query rows still keep
    all threads busy; the mask hides the slots the last piece has too many.
    """

    tokens: Index
    parts: Index  # where the tokens' results go, in the flat [parts x T] buffer
    num_tokens: int
    slots: Index  # a slice of slots, or block ids
    padded_length: int
    pieces: int = 1
    mask: Tensor | None = None  # [pieces, 1, 1, padded_length / pieces], additive


@dataclass(slots=True)
class TailItem:
    """Short private tails of decoding rows, padded to one length."""

    tokens: Index
    parts: Index
    blocks: Tensor  # int64 [rows * blocks]
    mask: Tensor | None  # [rows, 1, 1, length], additive
    num_rows: int
    length: int


@dataclass(slots=True)
class CausalItem:
    """A prefill chunk against itself; its K and V are still at hand."""

    tokens: slice
    parts: slice


@dataclass(slots=True)
class WindowItem:
    """A row under a sliding window: its visible blocks and an additive mask."""

    tokens: slice
    blocks: Tensor
    offset: int
    length: int
    mask: Tensor  # [query tokens, length]


@dataclass(slots=True)
class TorchPlan:
    """Everything a layer needs. ``sparse`` parts start as -inf and zeros."""

    num_tokens: int
    slot_mapping: Index
    num_parts: int = 1
    sparse: bool = False
    runs: list[RunItem] = field(default_factory=list)
    tails: list[TailItem] = field(default_factory=list)
    causal: list[CausalItem] = field(default_factory=list)
    windows: list[WindowItem] = field(default_factory=list)
    tokens_read: int = 0  # KV tokens read by the plan, per layer


def as_index(values: IntArray) -> Index:
    """A slice when the values count up by one, else an index tensor."""
    first = int(values[0])
    if int(values[-1]) - first == len(values) - 1 and (np.diff(values) == 1).all():
        return slice(first, first + len(values))
    return torch.from_numpy(values.astype(np.int64))


class PlanBuilder:
    """Builds the plan of one step."""

    def __init__(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> None:
        self._batch, self._block_size, self._dtype = batch, block_size, dtype
        self._starts = batch.query_start_loc[:-1]
        self._lens = batch.query_lens
        # what each row reads from the cache without a mask
        self._kv_lens = batch.num_computed + (self._lens == 1)
        slots = as_index(batch.slot_mapping(block_size))
        self.plan = TorchPlan(batch.num_tokens, slots)

    def build(self, share: bool) -> TorchPlan:
        """Return the plan; ``share=False`` reads every prefix once a request."""
        threshold = MIN_SAVED_TOKENS if share else NEVER_SHARE
        forest = build_forest(
            self._batch.block_tables, self._kv_lens // self._block_size, self._block_size, threshold
        )
        self._num_parts = self._count_parts(forest)
        self.plan.num_parts = int(self._num_parts.max(initial=1))
        self.plan.sparse = bool((self._num_parts < self.plan.num_parts).any())
        self._add_runs(forest)
        self._add_tails(forest)
        self._add_causal()
        return self.plan

    def _count_parts(self, forest: Forest) -> IntArray:
        has_tail = self._kv_lens > forest.tail_start * self._block_size
        return forest.num_runs + has_tail + (self._lens > 1)

    def _parts(self, tokens: IntArray, levels: IntArray | int) -> Index:
        return as_index(tokens + levels * self.plan.num_tokens)

    def _tokens_of(self, rows: IntArray) -> IntArray:
        spans = [
            np.arange(self._starts[r], self._starts[r] + self._lens[r], dtype=np.int64)
            for r in rows
        ]
        return np.concatenate(spans)

    def _add_run(self, tokens: IntArray, level: int, block_ids: IntArray, length: int) -> None:
        slots = as_index(block_ids)
        if isinstance(slots, slice):
            slots = slice(slots.start * self._block_size, slots.stop * self._block_size)
        pieces = self._num_pieces(len(tokens), length)
        padded = -(-length // pieces) * pieces
        mask = self._hide_after(length, padded, (pieces, 1, 1, padded // pieces))
        parts = self._parts(tokens, level)
        self.plan.runs.append(
            RunItem(as_index(tokens), parts, len(tokens), slots, padded, pieces, mask)
        )
        self.plan.tokens_read += length

    def _num_pieces(self, num_tokens: int, length: int) -> int:
        """More than one only where query rows are few and keys are many.

        Divides the block size, so that padding never leaves the last block.
        """
        few = num_tokens <= FEW_TOKENS and length >= PIECES * MIN_PIECE_TOKENS
        return PIECES if few and self._block_size % PIECES == 0 else 1

    def _hide_after(self, length: int, padded: int, shape: tuple[int, ...]) -> Tensor | None:
        if length == padded:
            return None
        return self._additive((torch.arange(padded) >= length).view(shape))

    def _additive(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)

    def _add_runs(self, forest: Forest) -> None:
        for run in forest.runs:
            length = len(run.block_ids) * self._block_size
            self._add_run(self._tokens_of(run.rows), run.level, run.block_ids, length)

    def _add_tails(self, forest: Forest) -> None:
        tail_lens = self._kv_lens - forest.tail_start * self._block_size
        short = (self._lens == 1) & (tail_lens > 0) & (tail_lens <= SHORT_TAIL_TOKENS)
        buckets: dict[int, list[int]] = {}
        for row in np.flatnonzero(short).tolist():
            blocks = -(-int(tail_lens[row]) // self._block_size)
            buckets.setdefault(1 << (blocks - 1).bit_length(), []).append(row)
        for width in list(buckets):
            if len(buckets[width]) == 1:  # alone: no padding, no gather where it is contiguous
                short[buckets.pop(width)] = False
        for width, rows in buckets.items():
            self._add_tail_batch(np.array(rows), width, tail_lens, forest)
        for row in np.flatnonzero((tail_lens > 0) & ~short).tolist():
            start, length = int(forest.tail_start[row]), int(tail_lens[row])
            end = start + -(-length // self._block_size)
            ids = self._batch.block_tables[row, start:end]
            tokens = self._tokens_of(np.array([row]))
            self._add_run(tokens, int(forest.num_runs[row]), ids, length)

    def _add_tail_batch(
        self, rows: IntArray, width: int, tail_lens: IntArray, forest: Forest
    ) -> None:
        lens = tail_lens[rows]
        width = -(-int(lens.max()) // self._block_size)
        columns = forest.tail_start[rows][:, None] + np.arange(width)
        used = np.arange(width) < -(-lens // self._block_size)[:, None]
        columns = np.where(used, columns, forest.tail_start[rows][:, None])
        blocks = self._batch.block_tables[rows[:, None], columns].astype(np.int64)
        length = width * self._block_size
        mask = None
        if (lens < length).any():
            hidden = torch.from_numpy(np.arange(length) >= lens[:, None])
            mask = self._additive(hidden)[:, None, None, :]
        tokens = self._starts[rows]
        parts = self._parts(tokens, forest.num_runs[rows])
        self.plan.tails.append(
            TailItem(
                as_index(tokens), parts, torch.from_numpy(blocks.ravel()), mask, len(rows), length
            )
        )
        self.plan.tokens_read += int(lens.sum())

    def _add_causal(self) -> None:
        for row in np.flatnonzero(self._lens > 1).tolist():
            first, end = int(self._starts[row]), int(self._starts[row] + self._lens[row])
            shift = (int(self._num_parts[row]) - 1) * self.plan.num_tokens
            self.plan.causal.append(
                CausalItem(slice(first, end), slice(first + shift, end + shift))
            )
            self.plan.tokens_read += end - first

    def build_windows(self, window: int) -> list[WindowItem]:
        """Items of a sliding-window layer, one a row."""
        items = []
        for row in range(len(self._lens)):
            first, count = int(self._batch.num_computed[row]), int(self._lens[row])
            items.append(self._window_item(row, first, count, window))
        return items

    def _window_item(self, row: int, first: int, count: int, window: int) -> WindowItem:
        begin = max(0, first - window + 1)
        block, offset = divmod(begin, self._block_size)
        last = -(-(first + count) // self._block_size)
        ids = self._batch.block_tables[row, block:last].astype(np.int64)
        length = first + count - begin
        query = torch.arange(first, first + count)[:, None]
        key = torch.arange(begin, begin + length)
        hidden = (key > query) | (key <= query - window)
        mask = self._additive(hidden)
        start = int(self._starts[row])
        return WindowItem(slice(start, start + count), torch.from_numpy(ids), offset, length, mask)
