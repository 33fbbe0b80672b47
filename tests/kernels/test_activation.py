"""silu(gate) * up against its definition in float64."""

import pytest
import torch
import torch.nn.functional as F

from tiny_vllm.ops.kernels.activation import silu_mul


def expected(x):
    gate, up = x.double().chunk(2, -1)
    return F.silu(gate) * up


def tolerance(dtype):
    return {"rtol": torch.finfo(dtype).eps + 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("rows, width", [(1, 1024), (3, 1025), (2, 1), (5, 96), (1, 3000)])
def test_equals_the_definition(rows, width, dtype, device, generator):
    x = torch.randn(rows, 2 * width, device=device, generator=generator).mul(3).to(dtype)
    out = torch.full((rows, width), float("nan"), device=device, dtype=dtype)
    assert silu_mul(x, out) is out
    torch.testing.assert_close(out.double(), expected(x), **tolerance(dtype))
    assert torch.equal(silu_mul(x), out)


def test_rows_may_lie_apart_in_input_and_output(dtype, device, generator):
    x = torch.randn(6, 150, device=device, generator=generator).to(dtype)[::2, 7:147]
    room = torch.full((3, 90), float("nan"), device=device, dtype=dtype)
    silu_mul(x, room[:, :70])
    torch.testing.assert_close(room[:, :70].double(), expected(x), **tolerance(dtype))
    assert room[:, 70:].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_large_gates_saturate(dtype, device):
    """exp overflows in float32 for a gate of -200: the result is zero, not NaN."""
    x = torch.tensor([[-200.0, 200.0, -30000.0, 30000.0] + [1.0] * 4], device=device, dtype=dtype)
    want = torch.tensor([[0.0, 200.0, 0.0, 30000.0]], device=device, dtype=dtype)
    torch.testing.assert_close(silu_mul(x), want, rtol=0.0, atol=0.0)


def test_no_rows(dtype, device):
    assert silu_mul(torch.empty(0, 128, device=device, dtype=dtype)).shape == (0, 64)
