"""The prefix forest of a batch: which runs of blocks are shared by which rows.

Sorting the block tables brings equal prefixes together; the longest common prefix of
neighbours then gives the tree. Torch-free. Invariant: every block below
``num_shareable`` is covered exactly once a row, by shared runs or by its tail.

    row 0  [ a a a a | b b | t ]        runs: a (rows 0-3), b (rows 0-1), c (rows 2-3)
    row 1  [ a a a a | b b | t ]        tails: t
    row 2  [ a a a a | c | t t ]
    row 3  [ a a a a | c | t   ]
"""

from dataclasses import dataclass, field

import numpy as np

from tiny_vllm.attention.metadata import IntArray

MIN_SAVED_TOKENS = 128  # a run that saves fewer reads is not worth an item and a merge
NEVER_SHARE = 1 << 60
MAX_RUNS_PER_ROW = 8  # merging costs more than the reads it saves beyond this


@dataclass(slots=True)
class SharedRun:
    """Consecutive blocks that several rows have in common.

    ``level`` counts the runs above it: the index of this part in a member's merge.
    """

    rows: IntArray
    block_ids: IntArray
    first_block: int
    level: int


@dataclass(slots=True)
class Forest:
    """Shared runs, top down, and per row where its private tail starts (in blocks)."""

    tail_start: IntArray
    num_runs: IntArray  # shared runs above each row's tail
    runs: list[SharedRun] = field(default_factory=list)


def build_forest(
    block_tables: IntArray,
    num_shareable: IntArray,
    block_size: int,
    min_saved_tokens: int,
    max_runs: int = MAX_RUNS_PER_ROW,
) -> Forest:
    """Find the shared runs of a batch.

    Args:
        block_tables: int32 [B, width].
        num_shareable: int [B], leading full blocks of each row that may be shared.
        min_saved_tokens: a run is split off when reading it once instead of once a
            member saves at least this many tokens; else its blocks go to its children.
    """
    num_rows = len(num_shareable)
    forest = Forest(np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64))
    if num_rows < 2:
        return forest
    width = int(num_shareable.max())
    # Unshareable entries get numbers no other row has, so that prefixes end there.
    own = -1 - np.arange(num_rows, dtype=np.int32)[:, None]
    tables = np.where(
        np.arange(width) < num_shareable[:, None], block_tables[:, :width], own
    ).astype(">i4")
    keys = [row.tobytes() for row in tables]
    order = np.array(sorted(range(num_rows), key=keys.__getitem__))
    common = _adjacent_common_prefix(tables[order])
    # (first, last + 1, blocks already covered, runs above)
    stack = [(0, num_rows, 0, 0)]
    while stack:
        low, high, start, level = stack.pop()
        members = order[low:high]
        if high - low == 1 or level == max_runs:
            forest.tail_start[members] = start
            forest.num_runs[members] = level
            continue
        shared = int(common[low : high - 1].min())
        if (high - low - 1) * (shared - start) * block_size >= min_saved_tokens:
            ids = block_tables[members[0], start:shared]
            forest.runs.append(SharedRun(np.sort(members), ids, start, level))
            start, level = shared, level + 1
        cuts = low + 1 + np.flatnonzero(common[low : high - 1] == shared)
        bounds = [low, *cuts.tolist(), high]
        stack.extend((a, b, start, level) for a, b in zip(bounds, bounds[1:], strict=False))
    return forest


def _adjacent_common_prefix(tables: IntArray) -> IntArray:
    """Blocks that neighbouring rows have in common, int64 [B - 1]."""
    if tables.shape[1] == 0:
        return np.zeros(len(tables) - 1, np.int64)
    differ = tables[1:] != tables[:-1]
    first = differ.argmax(1)
    return np.where(differ.any(1), first, tables.shape[1])
