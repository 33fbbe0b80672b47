"""Random batches whose block tables branch like a prefix tree, as a prefix cache makes them.

Needs neither torch kernels nor triton: the planner's tests use it too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from tiny_vllm.attention.metadata import AttentionBatch


@dataclass(frozen=True)
class Branch:
    """How a row comes about.

    Attributes:
        parent: earlier row whose first full blocks it shares (modulo their number).
        keep: per mille of the parent's full blocks that it keeps.
        own: tokens computed beyond the shared blocks.
        length: tokens that the step runs.
        spare: blocks reserved beyond what the step needs.
    """

    parent: int | None
    keep: int
    own: int
    length: int
    spare: int = 0


def make_batch(branches: list[Branch], block_size: int, seed: int = 0) -> AttentionBatch:
    """The batch of these rows; block ids are shuffled, entries past a row's blocks are -1.

    A row may share blocks that its parent fills in this very step, as in the engine.
    """
    tables: list[list[int]] = []
    computed: list[int] = []
    fresh = 0
    for branch in branches:
        shared: list[int] = []
        if branch.parent is not None and tables:
            parent = branch.parent % len(tables)
            full = (computed[parent] + branches[parent].length) // block_size
            shared = tables[parent][: round(full * branch.keep / 1000)]
        computed.append(len(shared) * block_size + branch.own)
        blocks = -(-(computed[-1] + branch.length) // block_size) + branch.spare
        own = range(fresh, fresh + blocks - len(shared))
        fresh = own.stop
        tables.append([*shared, *own])
    padded = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    ids = np.random.default_rng(seed).permutation(fresh).astype(np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = ids[table]
    ends = np.cumsum([branch.length for branch in branches])
    return AttentionBatch(np.concatenate(([0], ends)), np.array(computed), padded)


def grown(batch: AttentionBatch, steps: np.ndarray, block_size: int) -> AttentionBatch:
    """The batch after each row advanced by so many tokens, into blocks of its own."""
    computed = batch.num_computed + steps
    width = -(-int((computed + batch.query_lens).max()) // block_size)
    extra = max(0, width - batch.block_tables.shape[1])
    tables = np.pad(batch.block_tables, ((0, 0), (0, extra)), constant_values=-1)
    for row, table in enumerate(tables):
        missing = table < 0
        table[missing] = 1_000_000 * (row + 1) + np.flatnonzero(missing)
    return AttentionBatch(batch.query_start_loc, computed, tables)


@st.composite
def batches(
    draw: Callable,
    block_size: int,
    *,
    max_rows: int = 12,
    max_own: int = 1500,
    max_chunk: int = 90,
) -> AttentionBatch:
    """Decodes alone, chunks alone or both; bushy, chained or unrelated rows."""
    kind = draw(st.sampled_from(["decode", "mixed", "mixed", "chunk"]))
    longest = max_own if draw(st.booleans()) else max_own // 8
    whole = st.integers(0, longest // block_size).map(lambda n: n * block_size)
    many = st.one_of(st.integers(2, max_chunk), st.integers(2, 4))
    length = {"decode": st.just(1), "chunk": many, "mixed": st.one_of(st.just(1), many)}[kind]
    branch = st.builds(
        Branch,
        parent=st.sampled_from([0, 0, 0, None, *range(max_rows)]),
        keep=st.one_of(st.just(1000), st.integers(0, 1000)),
        own=st.one_of(st.integers(0, longest), whole, st.integers(0, 3)),  # borders are special
        length=length,
        spare=st.integers(0, 1),
    )
    rows = draw(st.lists(branch, min_size=1, max_size=max_rows))
    return make_batch(rows, block_size, draw(st.integers(0, 3)))
