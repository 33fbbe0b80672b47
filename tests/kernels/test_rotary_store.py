"""Rotation and cache stores against the plain definition, in float64."""

import pytest
import torch

from tiny_vllm.ops.kernels.rotary import rotary_store
from tiny_vllm.ops.rotary import RotaryEmbedding

BLOCK = 4
MAX_POSITIONS = 40
NUM_BLOCKS = 16
EPS = 1e-6


class Case:
    """Random inputs of one call, and what it should give."""

    def __init__(self, tokens, heads, kv_heads, dim, dtype, device, generator, pad=0):
        def randn(*shape):
            return torch.randn(shape, device=device, generator=generator).to(dtype)

        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        width = (heads + 2 * kv_heads) * dim
        self.qkv = randn(tokens, width + pad)[:, :width]
        table = torch.randperm(NUM_BLOCKS, device=device, generator=generator)
        # Two requests, ten entries a row of which the last two are room.
        self.table = torch.full((2, 10), -1, device=device, dtype=torch.int32)
        self.table[:, :8] = table.view(2, 8)
        self.rows = torch.arange(tokens, device=device, dtype=torch.int32) % 2
        picks = torch.randperm(8 * BLOCK, device=device, generator=generator)
        self.positions = picks[torch.arange(tokens, device=device) % len(picks)]
        rotary = RotaryEmbedding(dim, MAX_POSITIONS, 10000.0, None, dtype, torch.device("cpu"))
        everything = torch.arange(MAX_POSITIONS)
        cos, sin = rotary.gather(everything)
        self.cos, self.sin = cos.squeeze(1).to(device), sin.squeeze(1).to(device)
        self.q_norm, self.k_norm = randn(dim), randn(dim)
        shape = (kv_heads, NUM_BLOCKS * BLOCK, dim)
        self.k_cache = torch.full(shape, float("nan"), device=device, dtype=dtype)
        self.v_cache = self.k_cache.clone()

    def call(self, norm=False, eps=EPS, out=None):
        return rotary_store(
            self.qkv,
            self.positions,
            self.rows,
            self.table[:, :9],
            self.cos,
            self.sin,
            self.k_cache,
            self.v_cache,
            num_heads=self.heads,
            block_size=BLOCK,
            q_norm=self.q_norm if norm else None,
            k_norm=self.k_norm if norm else None,
            eps=eps,
            out=out,
        )

    def expected(self, norm=False):
        """Return q [T, heads, D], k and v [T, kv_heads, D] in float64."""
        tokens = self.qkv.shape[0]
        x = self.qkv.double().reshape(tokens, -1, self.dim)
        q, k, v = x.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if norm:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        at = self.positions.clamp(min=0)
        cos, sin = self.cos[at].double().unsqueeze(1), self.sin[at].double().unsqueeze(1)
        half = self.dim // 2
        return q * cos + q.roll(half, -1) * sin, k * cos + k.roll(half, -1) * sin, v

    @staticmethod
    def _norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()

    def slots(self):
        rows, positions = self.rows.long(), self.positions
        return self.table[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK


def check(case, q, norm=False, live=slice(None)):
    """Compare q and both caches, and see that no other slot was touched."""
    dtype = case.qkv.dtype
    # The terms of a rotation may cancel, so the bound is absolute.
    bound = {"rtol": torch.finfo(dtype).eps, "atol": 2e-5}
    want_q, want_k, want_v = case.expected(norm)
    torch.testing.assert_close(q.double()[live], want_q[live], **bound)
    slots = case.slots()[live]
    for cache, want in ((case.k_cache, want_k), (case.v_cache, want_v)):
        stored = cache[:, slots].transpose(0, 1).double()
        torch.testing.assert_close(stored, want[live], **bound)
        rest = torch.ones(cache.shape[1], dtype=torch.bool, device=cache.device)
        rest[slots] = False
        assert cache[:, rest].isnan().all()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_equals_the_definition(dim, norm, dtype, device, generator):
    case = Case(5, 6, 2, dim, dtype, device, generator)
    out = torch.full((5, 6, dim), float("nan"), device=device, dtype=dtype)
    q = case.call(norm, out=out)
    assert q is out
    check(case, q, norm)


@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (1, 1), (7, 1), (3, 3), (14, 2)])
def test_head_counts(heads, kv_heads, dtype, device, generator):
    """Tiles that hold heads of one, two and three kinds, and a part-filled last tile."""
    case = Case(2, heads, kv_heads, 64, dtype, device, generator)
    check(case, case.call())


def test_rows_may_lie_apart(dtype, device, generator):
    case = Case(4, 4, 2, 64, dtype, device, generator, pad=24)
    check(case, case.call())


def test_v_is_stored_bit_for_bit(dtype, device, generator):
    case = Case(3, 4, 2, 96, dtype, device, generator)
    case.call(norm=True)
    v = case.qkv.reshape(3, -1, 96)[:, -2:]
    assert torch.equal(case.v_cache[:, case.slots()].transpose(0, 1), v)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # where eps = 0
@pytest.mark.parametrize("norm, eps", [(False, 0.0), (True, EPS), (True, 0.0)])
def test_padded_tokens_give_zeros_and_store_nothing(norm, eps, dtype, device, generator):
    """Whatever lies in the unused rows of the input, NaN too; their table row is not read."""
    case = Case(4, 4, 2, 64, dtype, device, generator)
    case.positions[1] = -1
    case.positions[3] = -7
    case.qkv[1] = float("nan")
    case.rows[1] = 1 << 30
    live = torch.tensor([0, 2], device=device)
    out = torch.full((4, 4, 64), float("nan"), device=device, dtype=dtype)
    q = case.call(norm, eps, out)
    assert torch.equal(q[[1, 3]], torch.zeros_like(q[[1, 3]]))
    case.rows[1] = 0
    case.positions.clamp_(min=0)
    check(case, q, norm, live)


def test_only_padding(dtype, device, generator):
    case = Case(1, 4, 2, 64, dtype, device, generator)
    case.positions[0] = -1
    assert torch.equal(case.call(), torch.zeros(1, 4, 64, device=device, dtype=dtype))
    assert case.k_cache.isnan().all() and case.v_cache.isnan().all()


def test_no_tokens(dtype, device, generator):
    case = Case(0, 4, 2, 64, dtype, device, generator)
    assert case.call().shape == (0, 4, 64)
    assert case.k_cache.isnan().all()


def test_the_caches_may_be_layers_of_one_pool(dtype, device, generator):
    """Head and slot strides are read from the views, K and V each its own."""
    case = Case(4, 4, 2, 64, dtype, device, generator)
    pool = torch.full((NUM_BLOCKS * BLOCK, 2, 3, 64), float("nan"), device=device, dtype=dtype)
    case.k_cache = pool[:, :, 0].transpose(0, 1)
    other = torch.full((2, 2, NUM_BLOCKS * BLOCK, 64), float("nan"), device=device, dtype=dtype)
    case.v_cache = other[1]
    check(case, case.call())
    assert pool[:, :, 1:].isnan().all() and other[0].isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="allocates 9 GB")
def test_a_cache_beyond_two_to_the_31_elements(device, generator):
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free device memory")
    case = Case(2, 2, 1, 128, torch.float16, device, generator)
    slots = (1 << 31) // 128 + 4 * BLOCK
    case.k_cache = torch.empty(1, slots, 128, device=device, dtype=torch.float16)
    case.v_cache = torch.empty(1, slots, 128, device=device, dtype=torch.float16)
    case.table.fill_(slots // BLOCK - 1)
    case.table[1].fill_(slots // BLOCK - 2)
    q = case.call()
    want_q, want_k, want_v = case.expected()
    bound = {"rtol": 1e-3, "atol": 2e-5}
    torch.testing.assert_close(q.double(), want_q, **bound)
    for cache, want in ((case.k_cache, want_k), (case.v_cache, want_v)):
        stored = cache[:, case.slots()].transpose(0, 1).double()
        torch.testing.assert_close(stored, want, **bound)
