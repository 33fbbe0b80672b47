"""RMS norm against its definition in float64."""

import pytest
import torch

from tiny_vllm.ops.kernels.norm import rms_norm

EPS = 1e-5


def expected(x, weight, eps=EPS):
    x, weight = x.double(), weight.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def tolerance(dtype):
    """One rounding of the result, and a little for float32 sums."""
    return {"rtol": torch.finfo(dtype).eps + 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(
    "rows, hidden", [(1, 2048), (3, 64), (5, 96), (2, 1), (7, 1000), (1, 16384)]
)
def test_equals_the_definition(rows, hidden, dtype, device, generator):
    x = torch.randn(rows, hidden, device=device, generator=generator).mul(3).to(dtype)
    weight = torch.randn(hidden, device=device, generator=generator).to(dtype)
    out = torch.full_like(x, float("nan"))
    assert rms_norm(x, weight, EPS, out) is out
    torch.testing.assert_close(out.double(), expected(x, weight), **tolerance(dtype))
    assert torch.equal(rms_norm(x, weight, EPS), out)


def test_rows_may_lie_apart_in_input_and_output(dtype, device, generator):
    wide = torch.randn(6, 200, device=device, generator=generator).to(dtype)
    x = wide[::2, 10:130]
    weight = torch.randn(120, device=device, generator=generator).to(dtype)
    room = torch.full((3, 150), float("nan"), device=device, dtype=dtype)
    rms_norm(x, weight, EPS, room[:, :120])
    torch.testing.assert_close(room[:, :120].double(), expected(x, weight), **tolerance(dtype))
    assert room[:, 120:].isnan().all()


def test_in_place(dtype, device, generator):
    x = torch.randn(4, 72, device=device, generator=generator).to(dtype)
    weight = torch.randn(72, device=device, generator=generator).to(dtype)
    want = rms_norm(x, weight, EPS)
    assert torch.equal(rms_norm(x, weight, EPS, out=x), want)


def test_squares_beyond_the_range_of_half_precision(device, generator):
    """The sum of squares is kept in float32: 1000 squared is infinite in fp16."""
    x = torch.randn(2, 64, device=device, generator=generator).mul(1000).half()
    weight = torch.ones(64, device=device, dtype=torch.float16)
    want = expected(x, weight)
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), want, **tolerance(x.dtype))


def test_a_row_of_zeros_stays_zero(dtype, device):
    x = torch.zeros(2, 48, device=device, dtype=dtype)
    weight = torch.ones(48, device=device, dtype=dtype)
    assert torch.equal(rms_norm(x, weight, EPS), x)


def test_no_rows(dtype, device):
    x = torch.empty(0, 64, device=device, dtype=dtype)
    assert rms_norm(x, torch.ones(64, device=device, dtype=dtype), EPS).shape == (0, 64)
