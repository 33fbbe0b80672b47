"""From a forest to work items of the forest kernel: tiles of query tokens x ranges of keys.

Torch-free. Key ranges are cut at absolute multiples of a segment length, so that a token's
partial results do not depend on who else is in the batch beyond that length. Invariant:
the items of a token cover each key position it sees exactly once; the kernel hides keys
past a token's own position.

A plan names rows of a block table and key positions, not blocks, and the last range of a
decoding row is open: the row may grow to `ItemPlan.valid_until` without a new plan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tiny_vllm.attention.metadata import AttentionBatch, IntArray
from tiny_vllm.attention.planner import (
    MIN_SAVED_TOKENS,
    NEVER_SHARE,
    Forest,
    build_forest,
)

TILE_ROWS = (16, 64, 128)  # query rows (tokens x heads of a KV head) of the tile classes
OPEN_END = 2**31 - 1
MAX_JOINED_ROWS = 64  # so many decodes run their tails with their wide runs, in one launch
_MIN_SEGMENT, _MAX_SEGMENT = 128, 1 << 14
_SMALL_SEGMENT = 512
_UNCUT = 1 << 30


@dataclass(slots=True)
class ItemPlan:
    """Flat arrays that the kernel reads.

    Attributes:
        items: tile rows -> int32 [n, 8] (row, kv_begin, kv_end, q_begin, q_count, part,
            is_final, 0), longest first.
        q_index: int32 [Q]; the first T entries are 0 .. T - 1.
        part_start: int32 [T + 1], slots of partial results; none for a token with one item.
        valid_until: int64 [B], the highest position of a row's first token for which the
            plan still holds.
        tokens_read: KV tokens read per layer, runs and chunks counted once.
    """

    items: dict[int, IntArray]
    q_index: IntArray
    part_start: IntArray
    valid_until: IntArray
    tokens_read: int

    @property
    def num_slots(self) -> int:
        return int(self.part_start[-1])


@dataclass(slots=True)
class _Columns:
    """Items under construction, a list a column."""

    row: list[int] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    q_begin: list[int] = field(default_factory=list)
    q_count: list[int] = field(default_factory=list)
    part: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)  # of an open range too, for the order

    def add_tiles(
        self, row: int, begin: int, ends: IntArray, first: IntArray, sizes: IntArray, part: int
    ) -> None:
        """Many tiles of one row, each from ``begin`` to its end."""
        self.row += [row] * len(ends)
        self.begin += [begin] * len(ends)
        self.end += ends.tolist()
        self.q_begin += first.tolist()
        self.q_count += sizes.tolist()
        self.part += [part] * len(ends)
        self.length += (ends - begin).tolist()

    def add(self, row: int, begin: int, end: int, q: tuple[int, int], part: int, stop: int) -> None:
        self.row.append(row)
        self.begin.append(begin)
        self.end.append(end)
        self.q_begin.append(q[0])
        self.q_count.append(q[1])
        self.part.append(part)
        self.length.append(stop - begin)


class ItemPlanner:
    """Builds plans for one model shape.

    Args:
        group: query heads per KV head.
        num_kv_heads: programs per item.
        block_size: tokens of a KV block.
        num_programs: programs the GPU runs at once; ranges are cut to give each some work.
        max_tile_rows: widest class that the kernel can be compiled for.
    """

    def __init__(
        self,
        group: int,
        num_kv_heads: int,
        block_size: int,
        num_programs: int,
        *,
        share: bool,
        max_tile_rows: int = TILE_ROWS[-1],
    ) -> None:
        assert group <= TILE_ROWS[-1], "a tile holds all query heads of a KV head"
        self._group, self._kv_heads = group, num_kv_heads
        self._block_size = block_size
        self._num_programs = num_programs
        self.widest = max(max_tile_rows, next(m for m in TILE_ROWS if group <= m))
        self._threshold = MIN_SAVED_TOKENS if share else NEVER_SHARE

    def build(
        self,
        batch: AttentionBatch,
        fits: Callable[[ItemPlan], bool] | None = None,
        skip: IntArray | None = None,
    ) -> ItemPlan:
        """Plan a step; ranges are made longer until the plan ``fits``, then nothing is shared.

        Args:
            skip: bool [B], chunks that run elsewhere: they get no items.
        """
        skip = np.zeros(len(batch.num_computed), bool) if skip is None else skip
        lens = batch.query_lens
        readable = batch.num_computed + (lens == 1)
        forest = build_forest(
            batch.block_tables,
            np.where(skip, 0, readable // self._block_size),
            self._block_size,
            self._threshold,
        )
        stretch = 1
        plan = _Build(self, batch, forest, stretch, skip).plan()
        while fits is not None and not fits(plan):
            stretch *= 2
            if stretch > _UNCUT:
                break
            if stretch == _UNCUT:  # each token has as many parts as shared runs: share nothing
                none = np.zeros(len(lens), np.int64)
                forest = Forest(none, none.copy())
            plan = _Build(self, batch, forest, stretch, skip).plan()
        return plan

    def segment(self, work: int) -> int:
        """Tokens of a key range: a power of two that spreads ``work`` over the GPU.

        Args:
            work: sum of key tokens over tiles.
        """
        wanted = max(1, work * self._kv_heads // self._num_programs)
        segment = 1 << round(math.log2(wanted))
        return max(self._block_size, min(max(segment, _MIN_SEGMENT), _MAX_SEGMENT))

    def tile_rows(self, num_tokens: int) -> int:
        """The class of tile for query tokens that see the same keys."""
        rows = num_tokens * self._group
        return next((m for m in TILE_ROWS if rows <= m <= self.widest), self.widest)


class _Build:
    """One plan in the making."""

    def __init__(
        self,
        planner: ItemPlanner,
        batch: AttentionBatch,
        forest: Forest,
        stretch: int,
        skip: IntArray,
    ) -> None:
        self._p, self._batch, self._forest = planner, batch, forest
        self._stretch, self._skip = stretch, skip
        self._lens = batch.query_lens
        self._starts = batch.query_start_loc[:-1]
        self._ends = batch.num_computed + self._lens
        self._tail_start = forest.tail_start * planner._block_size
        num_tokens = batch.num_tokens
        self._num_parts = np.zeros(num_tokens, np.int64)
        self._q_index: list[IntArray] = [np.arange(num_tokens, dtype=np.int32)]
        self._num_q = num_tokens
        # A decoding batch uses one class for wide runs: its CUDA graph has few forms, and
        # wider tiles gain nothing where reading counts (measured).
        self._decodes = bool((self._lens == 1).all())
        widest = max((len(run.rows) for run in forest.runs), default=0)
        is_wide = planner.tile_rows(widest) > TILE_ROWS[0]
        joins = self._decodes and is_wide and len(self._lens) <= MAX_JOINED_ROWS
        self._tail_class = max(planner.tile_rows(1), TILE_ROWS[joins])
        self._columns = {m: _Columns() for m in TILE_ROWS}
        self._valid_until = np.full(len(self._lens), np.iinfo(np.int64).max)
        self._tokens_read = int((self._ends - self._tail_start).sum())

    def plan(self) -> ItemPlan:
        tiles = self._run_tiles()
        segment = self._run_segment(tiles) * self._stretch
        for level in sorted(tiles):
            self._add_level(tiles[level], segment)
        self._add_decode_tails()
        self._add_chunks()
        part_counts = np.where(self._num_parts > 1, self._num_parts, 0)
        part_start = np.zeros(len(part_counts) + 1, np.int32)
        np.cumsum(part_counts, out=part_start[1:])
        return ItemPlan(
            {m: self._sorted(c) for m, c in self._columns.items() if c.row},
            np.concatenate(self._q_index),
            part_start,
            self._valid_until,
            self._tokens_read,
        )

    def _run_tiles(self) -> dict[int, list[tuple[int, int, int, IntArray]]]:
        """level -> (row, begin, end, tokens) of every shared run."""
        size = self._p._block_size
        levels: dict[int, list[tuple[int, int, int, IntArray]]] = {}
        for run in self._forest.runs:
            spans = [
                np.arange(self._starts[r], self._starts[r] + self._lens[r], dtype=np.int32)
                for r in run.rows.tolist()
            ]
            tokens = np.concatenate(spans)
            begin = run.first_block * size
            end = begin + len(run.block_ids) * size
            levels.setdefault(run.level, []).append((int(run.rows[0]), begin, end, tokens))
            self._tokens_read += end - begin
        return levels

    def _run_segment(self, tiles: dict[int, list[tuple[int, int, int, IntArray]]]) -> int:
        work = 0
        for runs in tiles.values():
            for _, begin, end, tokens in runs:
                rows = len(tokens) * self._p._group
                work += -(-rows // self._tile_rows(tokens)) * (end - begin)
        segment = self._p.segment(work)
        # Little work is latency: longer ranges leave fewer parts to merge (measured).
        return 2 * segment if self._decodes and segment <= _SMALL_SEGMENT else segment

    def _tile_rows(self, tokens: IntArray) -> int:
        rows = self._p.tile_rows(len(tokens))
        if not self._decodes:
            return rows
        return max(self._tail_class, min(rows, TILE_ROWS[1]))

    def _add_level(self, runs: list[tuple[int, int, int, IntArray]], segment: int) -> None:
        for row, begin, end, tokens in runs:
            tile_rows = self._tile_rows(tokens)
            per_tile = tile_rows // self._p._group
            part = int(self._num_parts[tokens[0]])
            cuts = _cuts(begin, end, segment)
            columns = self._columns[tile_rows]
            for a, b in zip(cuts, cuts[1:], strict=False):
                for first in range(0, len(tokens), per_tile):
                    q = (self._num_q + first, min(per_tile, len(tokens) - first))
                    columns.add(row, a, b, q, part, b)
                part += 1
            self._num_parts[tokens] = part
            self._q_index.append(tokens)
            self._num_q += len(tokens)

    def _add_decode_tails(self) -> None:
        columns = self._columns[self._tail_class]
        rows = np.flatnonzero(self._lens == 1)
        work = int((self._ends - self._tail_start)[rows].sum())
        segment = self._p.segment(work) * self._stretch
        for row in rows.tolist():
            token, end = int(self._starts[row]), int(self._ends[row])
            begin = int(self._tail_start[row])
            part = int(self._num_parts[token])
            cuts = _cuts(begin, end, segment)
            for a, b in zip(cuts, cuts[1:], strict=False):
                last = b == end
                columns.add(row, a, OPEN_END if last else b, (token, 1), part, b)
                part += 1
            self._num_parts[token] = part
            self._valid_until[row] = cuts[-2] + 2 * segment - 1

    def _add_chunks(self) -> None:
        rows = np.flatnonzero((self._lens > 1) & ~self._skip).tolist()
        if not rows:
            return
        tiles = {r: self._p.tile_rows(int(self._lens[r])) for r in rows}
        num_tiles = work = 0
        for r in rows:
            count = -(-int(self._lens[r]) * self._p._group // tiles[r])
            num_tiles += count
            work += count * int(self._ends[r] - self._tail_start[r])
        # Many tiles fill the GPU as they are, and an uncut one writes its result itself.
        fills = num_tiles * self._p._kv_heads >= 2 * self._p._num_programs
        segment = _UNCUT if fills else self._p.segment(work) * self._stretch
        for r in rows:
            self._add_chunk(r, tiles[r], segment)

    def _add_chunk(self, row: int, tile_rows: int, segment: int) -> None:
        per_tile = tile_rows // self._p._group
        start, count = int(self._starts[row]), int(self._lens[row])
        computed, begin = int(self._batch.num_computed[row]), int(self._tail_start[row])
        columns = self._columns[tile_rows]
        self._valid_until[row] = computed
        part = int(self._num_parts[start])
        if segment >= computed + count - begin // segment * segment:  # one item a tile
            firsts = np.arange(0, count, per_tile)
            sizes = np.minimum(per_tile, count - firsts)
            ends = computed + firsts + sizes
            columns.add_tiles(row, begin, ends, start + firsts, sizes, part)
            self._num_parts[start : start + count] = part + 1
            return
        for first in range(0, count, per_tile):
            size = min(per_tile, count - first)
            end = computed + first + size
            parts = part
            cuts = _cuts(begin, end, segment)
            for a, b in zip(cuts, cuts[1:], strict=False):
                columns.add(row, a, b, (start + first, size), parts, b)
                parts += 1
            self._num_parts[start + first : start + first + size] = parts

    def _sorted(self, c: _Columns) -> IntArray:
        table = np.zeros((len(c.row), 8), np.int32)
        for i, column in enumerate((c.row, c.begin, c.end, c.q_begin, c.q_count, c.part)):
            table[:, i] = column
        first_token = np.concatenate(self._q_index)[table[:, 3]]
        table[:, 6] = self._num_parts[first_token] == 1
        order = np.argsort(-np.array(c.length), kind="stable")
        return table[order]


def _cuts(begin: int, end: int, segment: int) -> list[int]:
    """begin, the multiples of ``segment`` between, end."""
    first = (begin // segment + 1) * segment
    return [begin, *range(first, end, segment), end]
