"""The planner of work items: whatever the forest, every token meets every key once."""

from collections import defaultdict
from dataclasses import dataclass, field
from math import gcd

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.forests import Branch, batches, grown, make_batch
from tiny_vllm.attention.items import MAX_JOINED_ROWS, OPEN_END, TILE_ROWS, ItemPlan, ItemPlanner
from tiny_vllm.attention.metadata import AttentionBatch
from tiny_vllm.attention.planner import MAX_RUNS_PER_ROW

BLOCK_SIZES = [1, 16, 32, 48, 64, 128]
MIN_SEGMENT = 128


@dataclass
class Reads:
    """What the items of a plan do."""

    cover: np.ndarray  # [T, longest]: how often a token meets a key position
    parts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finals: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    # (begin, end) of the key ranges of one tile, by its place in q_index
    runs: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    tails: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    keys: set[tuple[int, int]] = field(default_factory=set)  # (row, position) once each


def read(plan: ItemPlan, batch: AttentionBatch, block_size: int, group: int) -> Reads:
    """Follow the items as the kernel does, and check what each must satisfy alone."""
    positions, tokens = batch.positions(), batch.num_tokens
    ends = batch.num_computed + batch.query_lens
    row_of_token = np.repeat(np.arange(len(ends)), batch.query_lens)
    reads = Reads(np.zeros((tokens, int(ends.max())), np.int32))
    assert (plan.q_index[:tokens] == np.arange(tokens)).all()
    for tile_rows, table in plan.items.items():
        assert tile_rows in TILE_ROWS and len(table)
        assert table.dtype == np.int32 and table.shape[1] == 8
        for row, begin, end, q_begin, q_count, part, final, unused in table.tolist():
            assert q_count >= 1 and q_count * group <= tile_rows and unused == 0
            assert 0 <= q_begin and q_begin + q_count <= len(plan.q_index)
            members = plan.q_index[q_begin : q_begin + q_count]
            assert len(set(members.tolist())) == q_count
            stop = min(end, int(positions[members].max()) + 1)
            blocks = slice(begin // block_size, -(-stop // block_size))
            for other in set(row_of_token[members].tolist()) - {row}:
                mine, its = batch.block_tables[[row, other], blocks]
                assert (mine == its).all(), "a row reads blocks that are not its own"
            for token in members.tolist():
                reads.cover[token, begin : min(end, int(positions[token]) + 1)] += 1
                reads.parts[token].append(part)
                reads.finals[token].add(final)
            (reads.runs if q_begin >= tokens else reads.tails)[q_begin].append((begin, end))
            reads.keys.update((row, p) for p in range(begin, stop))
    return reads


def check_cover(
    plan: ItemPlan,
    batch: AttentionBatch,
    block_size: int,
    group: int,
    skip: np.ndarray | None = None,
) -> Reads:
    """What must hold token by token, now and later."""
    reads = read(plan, batch, block_size, group)
    skip = np.zeros(len(batch.num_computed), bool) if skip is None else skip
    skipped = np.repeat(skip, batch.query_lens)
    seen = np.arange(reads.cover.shape[1]) <= batch.positions()[:, None]
    assert (reads.cover == (seen & ~skipped[:, None])).all()
    counts = np.array([len(reads.parts[t]) for t in range(batch.num_tokens)])
    assert all(sorted(parts) == list(range(len(parts))) for parts in reads.parts.values())
    assert (counts[skipped] == 0).all() and (counts[~skipped] >= 1).all()
    assert plan.part_start.dtype == np.int32 and plan.part_start[0] == 0
    assert (np.diff(plan.part_start) == np.where(counts > 1, counts, 0)).all()
    assert plan.num_slots == plan.part_start[-1]
    for token, finals in reads.finals.items():
        assert not finals or finals == {int(counts[token] == 1)}
    return reads


def check_cuts(ranges: list[list[tuple[int, int]]], block_size: int) -> None:
    """Neighbouring ranges meet at all the multiples of one number, and nowhere else."""
    cuts: set[int] = set()
    for spans in ranges:
        spans.sort()
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        cuts.update(begin for begin, _ in spans[1:])
    if not cuts:
        return
    segment = gcd(*cuts)
    assert segment >= max(MIN_SEGMENT, block_size)
    for spans in ranges:
        for begin, end in spans:
            last = end if end != OPEN_END else begin + 1
            assert (begin // segment + 1) * segment >= last, "a range with a cut inside"


def check_plan(
    plan: ItemPlan,
    batch: AttentionBatch,
    block_size: int,
    group: int,
    skip: np.ndarray | None = None,
) -> Reads:
    """All invariants of a plan."""
    reads = check_cover(plan, batch, block_size, group, skip)
    lens = batch.query_lens
    ends = batch.num_computed + lens
    unread = 0 if skip is None else int(ends[skip].sum())
    assert plan.tokens_read == len(reads.keys) + unread
    for table in plan.items.values():  # what starts last should be short
        stop = np.where(table[:, 2] == OPEN_END, ends[table[:, 0]], table[:, 2])
        assert (np.diff(stop - table[:, 1]) <= 0).all()
    decodes = np.flatnonzero(lens == 1)
    first = {int(batch.query_start_loc[row]): row for row in decodes.tolist()}
    check_cuts(list(reads.runs.values()), block_size)
    check_cuts([spans for t, spans in reads.tails.items() if t not in first], block_size)
    check_decode_tails(plan, {row: reads.tails[t] for t, row in first.items()}, ends, block_size)
    if len(decodes) == len(lens):
        one = next(m for m in TILE_ROWS if group <= m)  # the class of one token
        assert set(plan.items) in ({one}, {64}, {one, 64})
        assert len(lens) > MAX_JOINED_ROWS or len(plan.items) == 1
    chunks = (lens > 1) if skip is None else (lens > 1) & ~skip
    assert (plan.valid_until[chunks] == batch.num_computed[chunks]).all()
    return reads


def check_decode_tails(
    plan: ItemPlan, tails: dict[int, list[tuple[int, int]]], ends: np.ndarray, block_size: int
) -> None:
    """Open at the end, cut at each multiple of the segment that `valid_until` promises."""
    segments = set()
    for row, spans in tails.items():
        spans.sort()
        assert [end == OPEN_END for _, end in spans] == [False] * (len(spans) - 1) + [True]
        segment, odd = divmod(int(plan.valid_until[row]) + 1 - spans[-1][0], 2)
        assert not odd and segment >= max(MIN_SEGMENT, block_size)
        begin, end = spans[0][0], int(ends[row])
        assert [b for b, _ in spans[1:]] == list(
            range((begin // segment + 1) * segment, end, segment)
        )
        assert plan.valid_until[row] >= end - 1
        segments.add(segment)
    assert len(segments) <= 1


def check_growth(
    plan: ItemPlan, batch: AttentionBatch, block_size: int, group: int, steps: list[int]
) -> None:
    """The plan stays right while decodes grow to `valid_until`, each at its own pace."""
    room = plan.valid_until - batch.num_computed
    longest = min(int(room.max()), 4 * int(batch.num_computed.max()) + 64)
    for i, step in enumerate([*steps, longest]):
        paces = np.full(len(room), step)
        paces[i % 2 :: 2] //= 2
        later = grown(batch, np.minimum(paces, room), block_size)
        check_cover(plan, later, block_size, group)


def planner(group=4, kv_heads=2, block_size=16, num_programs=24, share=True):
    return ItemPlanner(group, kv_heads, block_size, num_programs, share=share)


quick = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@settings(quick, max_examples=200)
@given(data=st.data())
def test_random_forests(block_size, data):
    """1200 forests: cover, parts, tiles, cuts, counts; and again while the rows grow."""
    batch = data.draw(batches(block_size))
    group = data.draw(st.integers(1, 16))
    p = planner(
        group,
        data.draw(st.integers(1, 4)),
        block_size,
        data.draw(st.sampled_from([4, 40, 264, 4000])),
        share=data.draw(st.sampled_from([True, True, True, False])),
    )
    skip = None
    is_chunk = batch.query_lens > 1
    if is_chunk.any() and data.draw(st.integers(0, 3)) == 0:
        skip = is_chunk & (np.arange(len(is_chunk)) % 2 == data.draw(st.integers(0, 1)))
    plan = p.build(batch, skip=skip)
    check_plan(plan, batch, block_size, group, skip)
    if not is_chunk.any():
        growth = data.draw(st.lists(st.integers(1, 300), max_size=2))
        check_growth(plan, batch, block_size, group, growth)


@pytest.mark.parametrize("group", [17, 24, 32, 64, 71, 128])
@settings(quick, max_examples=20)
@given(data=st.data())
def test_wide_groups(group, data):
    """One token of a model with few KV heads fills more than the smallest tile."""
    batch = data.draw(batches(16))
    plan = planner(group, 1).build(batch)
    check_plan(plan, batch, 16, group)


@pytest.mark.parametrize("max_tile_rows", [16, 64])
@settings(quick, max_examples=20)
@given(data=st.data())
def test_classes_that_cannot_be_compiled_are_not_used(max_tile_rows, data):
    batch = data.draw(batches(16))
    group = data.draw(st.integers(1, 24))
    plan = ItemPlanner(group, 2, 16, 24, share=True, max_tile_rows=max_tile_rows).build(batch)
    check_plan(plan, batch, 16, group)
    assert max(plan.items) <= max(max_tile_rows, 16 if group <= 16 else 64)


@settings(quick, max_examples=60)
@given(data=st.data())
def test_plans_are_stretched_until_they_fit(data):
    batch = data.draw(batches(16, max_own=3000))
    p = planner(num_programs=4000)
    freely = p.build(batch)
    limit = data.draw(st.integers(0, freely.num_slots))
    tried = []

    def fits(plan):
        tried.append(plan)
        return plan.num_slots <= limit

    plan = p.build(batch, fits)
    check_plan(plan, batch, 16, 4)
    assert plan is tried[-1]
    assert (plan.num_slots <= limit) or limit == 0
    for before, after in zip(tried, tried[1:], strict=False):
        assert after.num_slots <= before.num_slots


@settings(quick, max_examples=40)
@given(data=st.data())
def test_nothing_is_shared_without_sharing(data):
    batch = data.draw(batches(32))
    plan = planner(block_size=32, share=False).build(batch)
    reads = check_plan(plan, batch, 32, 4)
    assert not reads.runs
    assert plan.tokens_read == int((batch.num_computed + batch.query_lens).sum())


def siblings(rows, common, own, block_size=16):
    """``rows`` decodes over ``common`` tokens, each with ``own`` more."""
    first = Branch(None, 1000, common + own - 1, 1)
    blocks = common // block_size
    full = (common + own) // block_size
    keep = -(-1000 * blocks // full)  # of the first row's full blocks
    batch = make_batch([first, *[Branch(0, keep, own - 1, 1)] * (rows - 1)], block_size)
    shared = (batch.block_tables == batch.block_tables[0]).all(0)
    assert shared.sum() == blocks
    return batch


def test_a_common_prefix_is_read_once():
    batch = siblings(16, 1024, 40)
    plan = planner().build(batch)
    reads = check_plan(plan, batch, 16, 4)
    assert plan.tokens_read == 1024 + 16 * 40
    assert len(reads.runs) == 1 and set(plan.items) == {64}


@pytest.mark.parametrize(
    "rows, group, classes",
    [(4, 4, {16}), (5, 4, {64}), (64, 4, {64}), (65, 4, {16, 64}), (200, 4, {16, 64})]
    + [(16, 1, {16}), (17, 1, {64}), (2, 16, {64}), (3, 3, {16}), (200, 16, {16, 64})],
)
def test_decodes_use_few_tile_classes(rows, group, classes):
    """Each set of classes is a CUDA graph to capture: see `DecodeLoop.capture_all`."""
    batch = siblings(rows, 512, 30)
    plan = planner(group).build(batch)
    check_plan(plan, batch, 16, group)
    assert set(plan.items) == classes


def test_a_row_whose_last_block_is_shared_as_it_fills_has_an_empty_tail():
    """Row 1 enters with the block that row 0 completes in this step."""
    batch = make_batch([Branch(None, 0, 255, 1), Branch(0, 1000, 0, 1)], 16)
    plan = planner().build(batch)
    reads = check_plan(plan, batch, 16, 4)
    assert plan.tokens_read == 256 + 1
    assert reads.tails[0] == [(256, OPEN_END)]
    check_growth(plan, batch, 16, 4, [1, 16, 100])


def test_the_number_of_runs_is_bounded():
    """A chain of ever longer prefixes: more runs than a row may have."""
    rows = [Branch(None, 0, 200, 1)]
    rows += [Branch(i, 1000, 200, 1) for i in range(24)]
    batch = make_batch(rows, 16)
    plan = planner(num_programs=1).build(batch)
    reads = check_plan(plan, batch, 16, 4)
    assert max(map(len, reads.parts.values())) > MAX_RUNS_PER_ROW
    tails = {t: min(begin for begin, _ in spans) for t, spans in reads.tails.items()}
    assert tails[24] < 24 * 192  # the deepest shared blocks are read with the tail
    assert plan.tokens_read < int(batch.num_computed.sum())


def test_cuts_lie_at_the_same_positions_whatever_follows():
    """Two batches cut one prefix at the same places: partial results do not change."""
    places = []
    for own in (1, 37, 60):
        batch = siblings(8, 2048, own)
        reads = check_plan(planner().build(batch), batch, 16, 4)
        (ranges,) = reads.runs.values()
        assert all(begin % MIN_SEGMENT == 0 for begin, _ in ranges)
        places.append(ranges)
    assert places[0] == places[1] == places[2] and len(places[0]) > 1


def test_chunks_that_run_elsewhere_leave_the_others_alone():
    rows = [Branch(None, 0, 400, 1), Branch(0, 1000, 0, 80), Branch(0, 1000, 8, 1)]
    batch = make_batch(rows, 16)
    skip = np.array([False, True, False])
    plan = planner().build(batch, skip=skip)
    check_plan(plan, batch, 16, 4, skip)
    used = set(np.concatenate([t[:, 0] for t in plan.items.values()]).tolist())
    assert used == {0, 2}


def test_one_token_is_one_final_item():
    batch = make_batch([Branch(None, 0, 0, 1)], 64)
    plan = planner(block_size=64).build(batch)
    check_plan(plan, batch, 64, 4)
    assert plan.num_slots == 0
    assert plan.items[16].tolist() == [[0, 0, OPEN_END, 0, 1, 0, 1, 0]]
