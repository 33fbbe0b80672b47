"""The forest kernel and its merge against attention written out in float64."""

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.kernels.forests import Branch, batches, make_batch
from tiny_vllm.attention.items import TILE_ROWS, ItemPlanner
from tiny_vllm.attention.metadata import AttentionBatch
from tiny_vllm.ops.kernels.attention import (
    forest_attention,
    max_tile_rows,
    merge_parts,
    tile_config,
)
from tiny_vllm.ops.kernels.rotary import rotary_store
from tiny_vllm.ops.rotary import RotaryEmbedding

HAS_CUDA = torch.cuda.is_available()
on_cuda = pytest.mark.skipif(not HAS_CUDA, reason="too large for the interpreter")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def _no_warnings_of_the_interpreter():
    """Rows that are not stored take log 0; numpy would report it."""
    with np.errstate(all="ignore"):
        yield


class Case:
    """One call on random inputs: every slot that no row may read holds NaN.

    Args:
        shape: (heads, kv_heads, head_dim).
        spread: 1 keeps scores near 1; more makes the softmax sharper.
    """

    def __init__(
        self, batch, shape, block_size, dtype, device, *, window=None, seed=0, spread=1.0
    ) -> None:
        self.batch, self.block_size, self.window = batch, block_size, window
        self.heads, self.kv_heads, self.head_dim = shape
        self.dtype, self.device = dtype, device
        self.scale = self.head_dim**-0.5
        generator = torch.Generator(device=device).manual_seed(seed)

        def randn(*size):
            return torch.randn(size, device=device, generator=generator).to(dtype)

        tokens = batch.num_tokens
        self.q = randn(tokens, self.heads, self.head_dim) * spread
        ends = batch.num_computed + batch.query_lens
        nowhere = int(batch.block_tables.max()) + 1  # a block of NaN
        size = (self.kv_heads, (nowhere + 1) * block_size, self.head_dim)
        self.k, self.v = (torch.full(size, torch.nan, device=device, dtype=dtype) for _ in "kv")
        for row, end in enumerate(ends.tolist()):
            slots = self.slots(row, end)
            self.k[:, slots] = randn(self.kv_heads, end, self.head_dim)
            self.v[:, slots] = randn(self.kv_heads, end, self.head_dim)
        table = batch.block_tables.copy()
        used = -(-ends[:, None] // block_size)
        table[np.arange(table.shape[1]) >= used] = nowhere
        wide = torch.full((len(table), table.shape[1] + 3), nowhere, dtype=torch.int32)
        wide[:, : table.shape[1]] = torch.from_numpy(table)
        self.table = wide.to(device)[:, : table.shape[1]]

    def slots(self, row, end):
        position = np.arange(end)
        blocks = self.batch.block_tables[row, position // self.block_size].astype(np.int64)
        return torch.from_numpy(blocks * self.block_size + position % self.block_size).to(
            self.device
        )

    def expected(self):
        """Every row over its own context. [T, heads, head_dim] float64"""
        out = torch.empty(self.q.shape, dtype=torch.float64, device=self.device)
        group = self.heads // self.kv_heads
        starts = self.batch.query_start_loc.tolist()
        for row, computed in enumerate(self.batch.num_computed.tolist()):
            span = slice(starts[row], starts[row + 1])
            end = computed + span.stop - span.start
            slots = self.slots(row, end)
            k, v = (x[:, slots].double() for x in (self.k, self.v))
            q = self.q[span].double().unflatten(1, (self.kv_heads, group))
            scores = torch.einsum("thgd,hnd->hgtn", q, k) * self.scale
            query = torch.arange(computed, end, device=self.device)[:, None]
            key = torch.arange(end, device=self.device)
            hidden = key > query
            if self.window is not None:
                hidden |= key <= query - self.window
            probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[span] = torch.einsum("hgtn,hnd->thgd", probs, v).flatten(1, 2)
        return out

    def plan(self, share=True, num_programs=24, skip=None):
        group = self.heads // self.kv_heads
        planner = ItemPlanner(
            group,
            self.kv_heads,
            self.block_size,
            num_programs,
            share=share,
            max_tile_rows=max_tile_rows(self.head_dim, self.dtype),
        )
        return planner.build(self.batch, skip=skip)

    def run(self, plan, *, rotate=None, q=None, programs=5, capability=None, is_busy=True):
        """Outputs poisoned first."""

        def put(array, dtype=torch.int32):
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, dtype)

        if capability is None:
            capability = 90
            if HAS_CUDA:
                major, minor = torch.cuda.get_device_capability()
                capability = 10 * major + minor
        size = (max(plan.num_slots, 1), self.heads)
        parts = tuple(
            torch.full(s, torch.nan, device=self.device) for s in ((*size, self.head_dim), size)
        )
        out = torch.full(self.q.shape, torch.nan, dtype=self.dtype, device=self.device)
        counts = put([len(plan.items.get(rows, ())) for rows in TILE_ROWS])
        part_start, positions = put(plan.part_start), put(self.batch.positions(), torch.int64)
        for rows, items in plan.items.items():
            room = np.full((len(items) + 2, 8), 1 << 30)  # entries past the count are not read
            room[: len(items)] = items
            forest_attention(
                self.q if q is None else q,
                self.k,
                self.v,
                out,
                parts,
                put(room),
                counts,
                put(plan.q_index),
                positions,
                part_start,
                self.table,
                scale=self.scale,
                block_size=self.block_size,
                block_m=rows,
                class_index=TILE_ROWS.index(rows),
                num_programs=programs,
                config=tile_config(rows, self.head_dim, self.dtype, capability, is_busy),
                window=self.window,
                rotate=rotate,
            )
        if plan.num_slots:
            merge_parts(parts, part_start, out)
        return out

    def check(self, out, expected=None, factor=1.0):
        expected = self.expected() if expected is None else expected
        tolerance = TOLERANCE[self.dtype] * factor
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def family(block_size, long=150):
    """Decodes and chunks over a common prefix, a row of its own, a prompt of one token."""
    rows = [
        Branch(None, 0, long, 1),
        Branch(0, 900, 7, 1, 1),
        Branch(0, 900, 0, 5),
        Branch(0, 900, 20, 1),
        Branch(None, 0, 33, 1),
        Branch(None, 0, 0, 1, 1),
        Branch(1, 900, 3, 1),
    ]
    return make_batch(rows, block_size)


SHAPES = [
    ((4, 1, 64), 16),
    ((6, 2, 80), 32),
    ((7, 1, 96), 16),
    ((8, 1, 128), 64),
    ((3, 1, 256), 48),
    ((16, 1, 64), 128),
    ((2, 2, 64), 48),
    ((3, 3, 80), 16),
    ((14, 2, 64), 64),
]


@pytest.mark.parametrize("shape, block_size", SHAPES, ids=str)
def test_shapes(shape, block_size, dtype, device):
    case = Case(family(block_size), shape, block_size, dtype, device)
    plan = case.plan()
    case.check(case.run(plan))


def test_runs_are_shared_in_these_cases():
    """Else the tests above would not test the forest."""
    for _, block_size in SHAPES:
        batch = family(block_size)
        shared = len(ItemPlanner(4, 1, block_size, 24, share=True).build(batch).q_index)
        assert shared > batch.num_tokens


@pytest.mark.parametrize("capability, is_busy", [(0, True), (0, False), (90, True), (90, False)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_tile_of_keys(capability, is_busy, head_dim, device):
    if HAS_CUDA and capability == 0:
        pytest.skip("one of the interpreter")
    batch = make_batch([Branch(None, 0, 70, 1), Branch(None, 0, 64, 9)], 16)
    for dtype in (torch.float32, torch.float16):
        case = Case(batch, (4, 1, head_dim), 16, dtype, device)
        case.check(case.run(case.plan(), capability=capability, is_busy=is_busy))


@pytest.mark.parametrize("window", [1, 17, 64, 1000])
def test_sliding_window(window, dtype, device):
    case = Case(family(16, 200), (4, 2, 64), 16, dtype, device, window=window)
    case.check(case.run(case.plan(num_programs=200)))


def test_sharing_and_cuts_change_nothing(device):
    case = Case(family(16, 300), (8, 2, 64), 16, torch.float32, device)
    expected = case.expected()
    for share, num_programs in ((True, 1), (True, 1000), (False, 1), (False, 1000)):
        plan = case.plan(share, num_programs)
        case.check(case.run(plan), expected)


def test_the_size_of_the_grid_changes_no_bit(device, dtype):
    case = Case(family(16), (8, 2, 64), 16, dtype, device)
    plan = case.plan()
    first = case.run(plan, programs=1)
    assert torch.equal(first, case.run(plan, programs=7))
    assert torch.equal(first, case.run(plan, programs=64))


def test_one_token_requests(device, dtype):
    batch = make_batch([Branch(None, 0, 0, 1)] * 5, 16)
    case = Case(batch, (4, 2, 64), 16, dtype, device)
    out = case.run(case.plan())
    newest = torch.stack([case.v[:, case.slots(row, 1)][:, 0] for row in range(5)])
    assert torch.equal(out, newest.repeat_interleave(2, 1))


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
def test_borders_of_blocks(block_size, device):
    """The last key is the last of a block, the first of one, or fills a shared one now."""
    n = 2 * block_size
    rows = [
        Branch(None, 0, n + block_size - 1, 1),
        Branch(0, 1000, 0, 1),  # reads the block that row 0 completes: row 0's tail is empty
        Branch(0, 667, 0, 1),
        Branch(0, 667, block_size - 1, 1),
        Branch(0, 1000, 0, block_size),
        Branch(None, 0, n, 1),
        Branch(None, 0, 0, block_size + 1),
    ]
    case = Case(make_batch(rows, block_size), (4, 1, 64), block_size, torch.float32, device)
    with patch("tiny_vllm.attention.items.MIN_SAVED_TOKENS", 8):
        plan = case.plan()
    starts = [int(i[1]) for t in plan.items.values() for i in t if i[3] == 0]
    assert starts == [n + block_size]
    case.check(case.run(plan))


def test_chunks_of_the_widest_tiles(dtype, device):
    rows = [Branch(None, 0, 0, 70), Branch(0, 1000, 10, 40), Branch(None, 0, 130, 33)]
    case = Case(make_batch(rows, 16), (8, 2, 64), 16, dtype, device)
    plan = case.plan(num_programs=4)
    assert 128 in plan.items
    case.check(case.run(plan))
    case.check(case.run(case.plan(num_programs=4000)))


def test_groups_wider_than_the_smallest_tile(device):
    case = Case(family(16), (24, 1, 64), 16, torch.float32, device)
    case.check(case.run(case.plan()))


def test_skipped_chunks_are_not_written(device):
    batch = make_batch([Branch(None, 0, 40, 1), Branch(0, 1000, 0, 9), Branch(0, 1000, 5, 1)], 16)
    case = Case(batch, (4, 2, 64), 16, torch.float32, device)
    out = case.run(case.plan(skip=np.array([False, True, False])))
    expected = case.expected()
    case.check(out[[0, 10]], expected[[0, 10]])
    assert out[1:10].isnan().all()


def test_nothing_to_do(device):
    case = Case(make_batch([Branch(None, 0, 4, 1)], 16), (4, 2, 64), 16, torch.float32, device)
    plan = case.plan()
    plan.items = {16: np.zeros((0, 8), np.int32)}
    assert case.run(plan).isnan().all()


def test_queries_may_lie_apart(device, dtype):
    case = Case(family(16), (4, 2, 64), 16, dtype, device)
    wide = torch.full((len(case.q), 9, 64), torch.nan, dtype=dtype, device=device)
    wide[:, :4] = case.q
    case.check(case.run(case.plan(), q=wide[:, :4]))


@pytest.mark.parametrize("spread", [30.0, 1000.0])
def test_large_scores(spread, device):
    """The softmax is nearly an arg-max; nothing may overflow."""
    case = Case(family(16), (4, 1, 64), 16, torch.float32, device, spread=spread)
    case.check(case.run(case.plan(num_programs=1000)), factor=spread)


@pytest.mark.parametrize("shape, block_size", [((4, 2, 64), 16), ((3, 1, 80), 48)], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_rotation_inside_equals_rotation_before(shape, block_size, window, device, dtype):
    """A decoding batch from its projections; the newest keys and values get stored."""
    n = 2 * block_size
    owns = [0, 1, 37, block_size - 1, n, n + 5]
    rows = [Branch(None, 0, own, 1, 1) for own in owns]
    rows += [Branch(5, 1000, own, 1) for own in (0, 6)]
    batch = make_batch(rows, block_size)
    inside, before = (
        Case(batch, shape, block_size, dtype, device, window=window) for _ in range(2)
    )
    heads, kv_heads, dim = shape
    generator = torch.Generator(device=device).manual_seed(5)
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(len(owns) + 2, width, device=device, generator=generator).to(dtype)
    cos, sin = RotaryEmbedding(dim, 1024, 10000.0, None, dtype, device).tables
    for case in (inside, before):
        for row, computed in enumerate(batch.num_computed.tolist()):
            newest = case.slots(row, computed + 1)[-1]
            case.k[:, newest] = case.v[:, newest] = torch.nan
    before.q = rotary_store(
        qkv,
        torch.from_numpy(batch.positions()).to(device),
        torch.arange(len(qkv), dtype=torch.int32, device=device),
        before.table,
        cos,
        sin,
        before.k,
        before.v,
        num_heads=heads,
        block_size=block_size,
    )
    q = qkv[:, : heads * dim].unflatten(1, (heads, dim))
    with patch("tiny_vllm.attention.items.MIN_SAVED_TOKENS", 8):
        plan = inside.plan(num_programs=1000)
    assert set(plan.items) == {16} and len(plan.q_index) > len(qkv)
    before.check(inside.run(plan, q=q, rotate=(cos, sin)), factor=2)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(inside.k, before.k, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(inside.v.nan_to_num(7.0), before.v.nan_to_num(7.0))


@pytest.mark.parametrize("tokens", [3, 130])  # two kernels
@pytest.mark.parametrize("heads, head_dim", [(3, 80), (4, 64), (1, 256)])
def test_merge(tokens, heads, head_dim, device, dtype):
    """Any number of parts, some of which saw no key; tokens without parts stay as they are."""
    generator = torch.Generator(device=device).manual_seed(tokens + heads)
    counts = torch.tensor([0, 40, 1, 2, 17, 0, 16])[torch.arange(tokens) % 7]
    if tokens > 100:
        counts[20:] %= 3
    start = torch.zeros(tokens + 1, dtype=torch.int32)
    start[1:] = counts.cumsum(0)
    slots = int(start[-1])
    partial = torch.randn(slots, heads, head_dim, device=device, generator=generator)
    lse = 8 * torch.randn(slots, heads, device=device, generator=generator)
    unseen = torch.rand(slots, heads, device=device, generator=generator) < 0.3
    lse[unseen], partial[unseen] = -torch.inf, 0.0
    lse[int(start[2]) : int(start[3])] = -torch.inf  # a token that saw nothing gets zeros
    partial[int(start[2]) : int(start[3])] = 0.0
    out = torch.full((tokens, heads, head_dim), torch.nan, device=device, dtype=dtype)
    merge_parts((partial, lse), start.to(device), out)
    for token, (begin, end) in enumerate(pairwise(start.tolist())):
        if begin == end:
            assert out[token].isnan().all()
            continue
        weight = (lse[begin:end].double() * np.log(2)).softmax(0).nan_to_num(0.0)
        expected = (weight[..., None] * partial[begin:end].double()).sum(0)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out[token].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [16, 48, 64])
@settings(
    deadline=None,
    max_examples=150 if HAS_CUDA else 70,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes too long
    suppress_health_check=[*HealthCheck],
)
@given(data=st.data())
def test_random_forests(block_size, device, data):
    """A sample of the forests of the planner's tests, small ones under the interpreter."""
    size = (12, 1500, 90) if HAS_CUDA else (6, 160, 12)
    limits = dict(zip(("max_rows", "max_own", "max_chunk"), size, strict=True))
    batch = data.draw(batches(block_size, **limits))
    group, kv_heads = data.draw(st.sampled_from([(1, 2), (3, 1), (4, 2), (7, 1), (16, 1)]))
    case = Case(batch, (group * kv_heads, kv_heads, 64), block_size, torch.float32, device)
    small = {"MIN_SAVED_TOKENS": 32, "_MIN_SEGMENT": 64}
    with patch.multiple("tiny_vllm.attention.items", **small):
        plan = case.plan(share=data.draw(st.sampled_from([True, True, False])), num_programs=1000)
    case.check(case.run(plan))


@on_cuda
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_contexts(head_dim, device, dtype):
    """128 k tokens in common, and chunks of different branches far into them."""
    rows = [Branch(None, 0, 131_000, 1)]
    rows += [Branch(0, 1000 - 30 * (i % 4), 100 * i, 1 if i % 3 else 257) for i in range(24)]
    case = Case(make_batch(rows, 64), (8, 2, head_dim), 64, dtype, device)
    case.check(case.run(case.plan(num_programs=264), programs=264))
    case.check(case.run(case.plan(False, num_programs=264), programs=264))


@on_cuda
@pytest.mark.parametrize("rows", [65, 256])
def test_large_batches(rows, device, dtype):
    branches = [Branch(None, 0, 4000, 1)]
    branches += [Branch(i // 3, 1000 - 7 * (i % 50), 13 * i % 700, 1) for i in range(rows - 1)]
    case = Case(make_batch(branches, 64), (32, 8, 64), 64, dtype, device)
    case.check(case.run(case.plan(num_programs=264), programs=528))


@on_cuda
def test_caches_of_more_than_2_31_elements(device):
    """Addresses are 64-bit: the rows lie at the end of a cache of 2.5 G elements."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of GPU memory")
    batch = family(64)
    far = AttentionBatch(batch.query_start_loc, batch.num_computed, batch.block_tables.copy())
    far.block_tables[far.block_tables >= 0] += 150_000  # x 64 tokens x 128 x 2 heads
    near = Case(batch, (8, 2, 128), 64, torch.float16, device)
    case = Case(make_batch([Branch(None, 0, 0, 1)], 64), (8, 2, 128), 64, torch.float16, device)
    case.batch, case.q = far, near.q
    case.table = (near.table + 150_000).contiguous()
    shape = (2, (150_000 + int(near.table.max()) + 1) * 64, 128)
    case.k, case.v = (torch.empty(shape, dtype=torch.float16, device=device) for _ in "kv")
    case.k[:, 150_000 * 64 :], case.v[:, 150_000 * 64 :] = near.k, near.v
    assert torch.equal(case.run(case.plan()), near.run(near.plan()))
