"""Fused products of a few rows against their definitions, in float64."""

import pytest
import torch
import torch.nn.functional as F

from tiny_vllm.ops.kernels import linear
from tiny_vllm.ops.kernels.linear import (
    CANDIDATES,
    Config,
    config,
    linear_add_,
    norm_gated,
    norm_linear,
    norm_lm_head,
)

EPS = 1e-5
GEMV = Config(block_n=8, block_k=256, split=1, warps=1, stages=1, dot=False)
DOT = Config(block_n=16, block_k=64, split=1, warps=1, stages=2, dot=True)
# Both kernels, either way to load, K in one part, in two, and in more than there is K for.
CUTS = {
    "gemv": GEMV,
    "gemv-stages": GEMV._replace(stages=3),
    "gemv-split": GEMV._replace(split=2),
    "gemv-split-stages": GEMV._replace(split=3, stages=3),
    "gemv-empty-part": GEMV._replace(split=4),
    "dot": DOT,
    "dot-split": DOT._replace(split=3),
    "dot-empty-part": DOT._replace(split=16),
}


@pytest.fixture(params=CUTS.values(), ids=CUTS.keys())
def cut(request):
    return request.param


def maker(device, dtype, generator):
    def make(*shape, scale=1.0):
        return torch.randn(shape, device=device, generator=generator).mul(scale).to(dtype)

    return make


@pytest.fixture
def randn(device, dtype, generator):
    return maker(device, dtype, generator)


@pytest.fixture
def randn16(device, generator):
    """In one 16-bit type: each cut is a compilation of its own on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    return maker(device, dtype, generator)


def nan(*shape, like, dtype=None):
    return torch.full(shape, float("nan"), device=like.device, dtype=dtype or like.dtype)


def normed(x, norm_weight):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm_weight.double()


def product(x, weight):
    """Return x W^T of float64 rows, and the error that rounding x to the type of W allows."""
    eps = torch.finfo(weight.dtype).eps + 2e-6  # the latter: float32 sums
    weight = weight.double()
    return x @ weight.T, 3 * eps * (x.square() @ weight.square().T).sqrt()


def check(got, want, bound):
    """One rounding of the result, beside the bound."""
    error = (got.double() - want).abs()
    allowed = bound + torch.finfo(got.dtype).eps * want.abs() + 1e-6
    assert (error <= allowed).all(), f"worst error {(error / allowed).max():.3g} of the allowed"


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 11, 16])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_norm_linear(rows, has_bias, randn):
    """As `config` cuts it: the number of rows picks the kernel."""
    x, norm_weight, weight = randn(rows, 320), randn(320), randn(30, 320, scale=0.1)
    bias = randn(30) if has_bias else None
    out = nan(rows, 30, like=x)
    assert norm_linear(x, norm_weight, EPS, weight, bias, out) is out
    want, bound = product(normed(x, norm_weight), weight)
    check(out, want + bias.double() if has_bias else want, bound)
    assert torch.equal(norm_linear(x, norm_weight, EPS, weight, bias), out)


@pytest.mark.parametrize("rows, width", [(3, 600), (1, 512), (2, 8)])
def test_norm_linear_however_it_is_cut(rows, width, cut, randn16):
    x, norm_weight, weight = randn16(rows, width), randn16(width), randn16(19, width, scale=0.1)
    out = norm_linear(x, norm_weight, EPS, weight, out=nan(rows, 19, like=x), cut=cut)
    check(out, *product(normed(x, norm_weight), weight))


@pytest.mark.parametrize("rows", [1, 6])
def test_norm_gated(rows, cut, randn16):
    """11 pairs: tiles of gate and up rows end in the middle."""
    x, norm_weight, weight = randn16(rows, 320), randn16(320), randn16(22, 320, scale=0.1)
    out = nan(rows, 11, like=x)
    assert norm_gated(x, norm_weight, EPS, weight, out, cut=cut) is out
    both, bound = product(normed(x, norm_weight), weight)
    (gate, up), (gate_bound, up_bound) = both.chunk(2, -1), bound.chunk(2, -1)
    slope = 1.1  # of silu, at most
    bound = slope * gate_bound * (up.abs() + up_bound) + up_bound * F.silu(gate).abs()
    check(out, F.silu(gate) * up, bound)


@pytest.mark.parametrize("rows, has_bias", [(1, False), (5, True)])
def test_linear_add(rows, has_bias, cut, randn16):
    hidden, x, weight = randn16(rows, 19), randn16(rows, 600), randn16(19, 600, scale=0.1)
    bias = randn16(19) if has_bias else None
    want, bound = product(x.double(), weight)
    want = want + hidden.double() + (bias.double() if has_bias else 0.0)
    assert linear_add_(hidden, x, weight, bias, cut=cut) is hidden
    check(hidden, want, bound)


@pytest.mark.parametrize("rows", [1, 6])
def test_norm_lm_head_is_float32(rows, randn):
    x, norm_weight, weight = randn(rows, 64), randn(64), randn(101, 64)
    out = norm_lm_head(x, norm_weight, EPS, weight, nan(rows, 101, like=x, dtype=torch.float32))
    assert out.dtype is torch.float32
    check(out, *product(normed(x, norm_weight), weight))
    rounded = norm_lm_head(x, norm_weight, EPS, weight, round_to=x.dtype)
    assert torch.equal(rounded, out.to(x.dtype).float())


def test_sixteen_bit_words_are_unpacked_exactly(device, generator):
    """bf16 too, without a GPU: the interpreter sees integers only."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(2, 64, device=device, generator=generator).to(dtype)
        weight = torch.randn(5, 64, device=device, generator=generator).to(dtype)
        norm_weight = torch.randn(64, device=device, generator=generator).to(dtype)
        out = norm_lm_head(x, norm_weight, EPS, weight)
        want = normed(x, norm_weight) @ weight.double().T
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)


def test_rows_may_lie_apart(cut, randn16):
    x, weight = randn16(6, 350)[::2, 8:328], randn16(19, 330, scale=0.1)[:, :320]
    norm_weight = randn16(320)
    room = nan(3, 50, like=x)
    norm_linear(x, norm_weight, EPS, weight, out=room[:, :19], cut=cut)
    check(room[:, :19], *product(normed(x, norm_weight), weight))
    assert room[:, 19:].isnan().all()
    hidden = randn16(3, 50)[:, :19]
    want, bound = product(x.double(), weight)
    want = want + hidden.double()
    linear_add_(hidden, x, weight, cut=cut)
    check(hidden, want, bound)


@pytest.mark.parametrize("rows", [1, 3])
def test_odd_widths_and_misaligned_views(rows, randn):
    """No row, or not every row, begins with a 32-bit word."""
    x, weight, norm_weight = randn(rows, 41), randn(19, 41), randn(41)
    check(norm_linear(x, norm_weight, EPS, weight), *product(normed(x, norm_weight), weight))
    shifted = randn(rows, 41)[:, 1:]
    weight, norm_weight = randn(19, 42)[:, 2:], randn(41)[1:]
    got = norm_linear(shifted, norm_weight, EPS, weight)
    check(got, *product(normed(shifted, norm_weight), weight))


def test_a_bad_row_spoils_no_other(cut, randn16):
    x, norm_weight, weight = randn16(3, 320), randn16(320), randn16(19, 320, scale=0.1)
    x[1] = float("nan")
    out = norm_linear(x, norm_weight, EPS, weight, cut=cut)
    assert out[1].isnan().all()
    x, out = x[[0, 2]], out[[0, 2]]
    check(out, *product(normed(x, norm_weight), weight))


@pytest.mark.parametrize("split", [GEMV._replace(split=3), DOT._replace(split=3)])
def test_the_workspace_of_a_split_product_is_left_ready(split, randn16, monkeypatch):
    """Counters are zero again after each call, and nothing of an earlier call is read."""
    spaces = []
    make = linear._workspace

    def spoiled(*args):
        partial, counters = make(*args)
        partial.fill_(float("nan"))
        spaces.append(counters)
        return partial, counters

    monkeypatch.setattr(linear, "_workspace", spoiled)
    for _ in range(3):
        x, weight, hidden = randn16(3, 600), randn16(19, 600, scale=0.1), randn16(3, 19)
        want, bound = product(x.double(), weight)
        want = want + hidden.double()
        check(linear_add_(hidden, x, weight, cut=split), want, bound)
        assert not spaces[-1].any()


@pytest.mark.parametrize("kernel", [GEMV, DOT], ids=["gemv", "dot"])
def test_norm_weights_that_carry_fp16_past_its_range(kernel, device, generator):
    """x times the norm weight is 80,000 before the factor of the norm brings it back."""
    x = torch.full((2, 64), 4000.0, device=device, dtype=torch.float16)
    norm_weight = torch.full((64,), 20.0, device=device, dtype=torch.float16)
    weight = torch.randn(16, 64, device=device, generator=generator).half()
    out = norm_linear(x, norm_weight, EPS, weight, cut=kernel)
    check(out, *product(normed(x, norm_weight), weight))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_large_gates_saturate(cut, device):
    x = torch.ones(2, 64, device=device, dtype=torch.float16)
    weight = torch.ones(4, 64, device=device, dtype=torch.float16)
    weight[0] = -2.0  # a gate of -128, of which exp overflows float32
    weight[1] = 2.0
    out = norm_gated(x, x[0], EPS, weight, cut=cut)
    want = torch.tensor([[0.0, 8192.0]] * 2, device=device, dtype=torch.float16)
    torch.testing.assert_close(out, want)


def test_no_rows(randn):
    x, norm_weight, weight = randn(0, 64), randn(64), randn(38, 64)
    assert norm_linear(x, norm_weight, EPS, weight).shape == (0, 38)
    assert norm_gated(x, norm_weight, EPS, weight).shape == (0, 19)
    assert linear_add_(randn(0, 38), x, weight).shape == (0, 38)
    assert norm_lm_head(x, norm_weight, EPS, weight).shape == (0, 38)


def test_too_many_rows_are_refused(randn):
    with pytest.raises(ValueError, match="at most 16 rows, got 17"):
        linear_add_(randn(17, 8), randn(17, 64), randn(8, 64))


@pytest.mark.parametrize("rows", [1, 4, 5, 16])
@pytest.mark.parametrize("shape", [(8, 8), (576, 576), (3072, 2048), (2048, 8192), (128256, 2048)])
def test_config_uses_all_of_k_in_every_part(shape, rows):
    cut = config(*shape, rows)
    assert cut.split == 1 or (cut.split - 1) * cut.block_k < shape[1]
    for size in (cut.block_n, cut.block_k, cut.split, cut.warps):
        assert size & (size - 1) == 0
    assert cut.block_n >= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="many configurations, of full size")
@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_candidates(candidate, randn16):
    from triton.runtime.errors import OutOfResources

    rows = 16 if candidate.dot else 4
    x, norm_weight, weight = randn16(rows, 2048), randn16(2048), randn16(200, 2048, scale=0.1)
    try:
        out = norm_linear(x, norm_weight, EPS, weight, cut=candidate)
    except OutOfResources:
        pytest.skip("needs more shared memory")
    check(out, *product(normed(x, norm_weight), weight))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="races show on a GPU alone")
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_captured_split_product_replays_bit_for_bit(rows, randn16):
    """The counters are reset on the device, and the parts are summed in one order."""
    cut = config(2048, 8192, 16)._replace(split=8) if rows > 4 else GEMV._replace(split=8)
    x, weight, start = randn16(rows, 8192), randn16(2048, 8192, scale=0.02), randn16(rows, 2048)
    hidden = start.clone()
    linear_add_(hidden, x, weight, cut=cut)
    first = hidden.clone()
    want, bound = product(x.double(), weight)
    check(first, want + start.double(), bound)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden.copy_(start)
        linear_add_(hidden, x, weight, cut=cut)
    for _ in range(50):
        graph.replay()
        assert torch.equal(hidden, first)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="dependent launches need Hopper",
)
@pytest.mark.parametrize("rows", [1, 8])
def test_dependent_launches_change_no_bit(rows, randn16):
    """A chain in which each product reads what the one before wrote."""
    gate_up, down = randn16(2048, 512, scale=0.05), randn16(512, 1024, scale=0.05)
    norm_weight, start = randn16(512), randn16(rows, 512)

    def chain(pdl):
        hidden = start.clone()
        for _ in range(20):
            middle = norm_gated(hidden, norm_weight, EPS, gate_up, pdl=pdl)
            linear_add_(hidden, middle, down, pdl=pdl)
        return hidden

    assert torch.equal(chain(True), chain(False))
