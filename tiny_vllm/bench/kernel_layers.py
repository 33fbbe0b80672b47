"""Prepares the ops of a decoder layer for `bench.kernels`. Imports torch.

Beside an element-wise op stands plain torch; beside a fused product of few rows stands what
many rows use, cuBLAS with separate kernels before and after it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.bench.kernel_cases import Case
from tiny_vllm.bench.kernel_timing import Built, Call, Place, fault
from tiny_vllm.bench.kernel_work import qkv_width

TORCH, CUBLAS = "torch", "cuBLAS"


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rms_norm_case(case: Case, place: Place) -> Built:
    from tiny_vllm.ops.kernels.norm import rms_norm
    from tiny_vllm.ops.norm import rms_norm as definition

    hidden, eps = place.config.hidden_size, place.config.rms_norm_eps
    copies = place.copies(case.num_bytes)
    x, weight = place.random(copies, case.rows, hidden), place.random(hidden)
    out = place.empty(copies, case.rows, hidden)

    def check() -> str | None:
        got = rms_norm(x[0], weight, eps, out[0].fill_(torch.nan), pdl=place.pdl)
        return fault(got, _normed(x[0], weight, eps), place.dtype)

    return Built(
        lambda i: rms_norm(x[i], weight, eps, out[i], pdl=place.pdl),
        {TORCH: lambda i: definition(x[i], weight, eps)},
        check,
        copies,
    )


def silu_mul_case(case: Case, place: Place) -> Built:
    from tiny_vllm.ops.kernels.activation import silu_mul

    width = place.config.intermediate_size
    copies = place.copies(case.num_bytes)
    x = place.random(copies, case.rows, 2 * width)
    out = place.empty(copies, case.rows, width)

    def check() -> str | None:
        got = silu_mul(x[0], out[0].fill_(torch.nan), pdl=place.pdl)
        return fault(got, _gated(x[0].float()), place.dtype)

    return Built(
        lambda i: silu_mul(x[i], out[i], pdl=place.pdl),
        {TORCH: lambda i: _gated(x[i])},
        check,
        copies,
    )


def rotary_store_case(case: Case, place: Place) -> Built:
    """A chunk of one request, its blocks in no order."""
    from tiny_vllm.ops.kernels.rotary import rotary_store
    from tiny_vllm.ops.rotary import RotaryEmbedding

    c, rows, size, device = place.config, case.rows, case.block_size, place.device
    copies = place.copies(case.num_bytes)
    qkv = place.random(copies, rows, qkv_width(c))
    positions = torch.arange(rows, device=device)
    table = torch.randperm(-(-rows // size), device=device).int()[None]
    slots = table[0, positions // size].long() * size + positions % size
    cache_shape = (copies, c.num_kv_heads, table.shape[1] * size, c.head_dim)
    keys, values = place.empty(*cache_shape), place.empty(*cache_shape)
    out = place.empty(copies, rows, c.num_heads, c.head_dim)
    norms = {n: place.random(c.head_dim) for n in ("q_norm", "k_norm")} if c.qk_norm else {}
    rotary = RotaryEmbedding(c.head_dim, rows, c.rope_theta, c.rope_scaling, place.dtype, device)
    cos, sin = rotary.tables
    row_of_token = torch.zeros(rows, dtype=torch.int32, device=device)

    def kernel(i: int) -> Tensor:
        return rotary_store(
            qkv[i], positions, row_of_token, table, cos, sin, keys[i], values[i],
            num_heads=c.num_heads, block_size=size, eps=c.rms_norm_eps, out=out[i],
            pdl=place.pdl, **norms,
        )  # fmt: skip

    def plain(x: Tensor, angles: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        kinds = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        q, k, v = x.view(rows, -1, c.head_dim).split(kinds, 1)
        if norms:
            q, k = (
                F.rms_norm(y, (c.head_dim,), norms[name].to(y.dtype), c.rms_norm_eps)
                for y, name in ((q, "q_norm"), (k, "k_norm"))
            )
        return rotary.rotate(q, *angles), rotary.rotate(k, *angles), v

    def stored(i: int) -> Tensor:
        q, k, v = plain(qkv[i], list(rotary.gather(positions)))
        keys[i][:, slots] = k.transpose(0, 1)
        values[i][:, slots] = v.transpose(0, 1)
        return q

    def check() -> str | None:
        for buffer in (keys[0], values[0], out[0]):
            buffer.fill_(torch.nan)
        got = kernel(0)
        found = got, keys[0][:, slots].transpose(0, 1), values[0][:, slots].transpose(0, 1)
        wanted = plain(qkv[0].float(), [x.float() for x in rotary.gather(positions)])
        faults = (fault(x, y, place.dtype) for x, y in zip(found, wanted, strict=True))
        return next((f for f in faults if f), None)

    return Built(kernel, {TORCH: stored}, check, copies)


def _product_case(
    case: Case,
    place: Place,
    shape: tuple[int, int],
    fused: Callable[[Tensor, Tensor, Tensor], Tensor],
    separate: Callable[[Tensor, Tensor, Tensor], Tensor],
    definition: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Built:
    """A product with a weight of ``shape``; all functions take x, the norm's weight, W."""
    out_features, width = shape
    x, norm = place.random(case.rows, width), place.random(width)
    copies = place.copies(out_features * width * place.dtype.itemsize)
    weights = place.random(copies, out_features, width, scale=width**-0.5)

    def check() -> str | None:
        got = fused(x, norm, weights[0])
        return fault(got, definition(x, norm, weights[0].float()), place.dtype)

    def call(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
        return lambda i: function(x, norm, weights[i])

    return Built(call(fused), {CUBLAS: call(separate)}, check, copies)


def norm_linear_case(case: Case, place: Place) -> Built:
    from tiny_vllm.ops.kernels.linear import norm_linear
    from tiny_vllm.ops.kernels.norm import rms_norm

    eps, pdl, width = place.config.rms_norm_eps, place.pdl, qkv_width(place.config)
    bias = place.random(width) if place.config.qkv_bias else None
    out = place.empty(case.rows, width).fill_(torch.nan)
    return _product_case(
        case,
        place,
        (width, place.config.hidden_size),
        lambda x, norm, w: norm_linear(x, norm, eps, w, bias, out, pdl=pdl),
        lambda x, norm, w: F.linear(rms_norm(x, norm, eps, pdl=pdl), w, bias),
        lambda x, norm, w: F.linear(
            _normed(x, norm, eps), w, None if bias is None else bias.float()
        ),
    )


def norm_gated_case(case: Case, place: Place) -> Built:
    from tiny_vllm.ops.kernels.activation import silu_mul
    from tiny_vllm.ops.kernels.linear import norm_gated
    from tiny_vllm.ops.kernels.norm import rms_norm

    eps, pdl, width = place.config.rms_norm_eps, place.pdl, place.config.intermediate_size
    out = place.empty(case.rows, width).fill_(torch.nan)
    return _product_case(
        case,
        place,
        (2 * width, place.config.hidden_size),
        lambda x, norm, w: norm_gated(x, norm, eps, w, out, pdl=pdl),
        lambda x, norm, w: silu_mul(F.linear(rms_norm(x, norm, eps, pdl=pdl), w), pdl=pdl),
        lambda x, norm, w: _gated(F.linear(_normed(x, norm, eps), w)),
    )


def add_out_case(case: Case, place: Place) -> Built:
    return _add_case(case, place, place.config.num_heads * place.config.head_dim)


def add_down_case(case: Case, place: Place) -> Built:
    return _add_case(case, place, place.config.intermediate_size)


def _add_case(case: Case, place: Place, width: int) -> Built:
    from tiny_vllm.ops.kernels.linear import linear_add_

    hidden = place.random(case.rows, place.config.hidden_size)
    before = hidden.to(torch.float32, copy=True)  # `check` comes first: each call adds again
    return _product_case(
        case,
        place,
        (place.config.hidden_size, width),
        lambda x, _, w: linear_add_(hidden, x, w, pdl=place.pdl),
        lambda x, _, w: hidden.addmm_(x, w.t()),
        lambda x, _, w: before + F.linear(x.float(), w),
    )


def lm_head_case(case: Case, place: Place) -> Built:
    from tiny_vllm.ops.kernels.linear import norm_lm_head
    from tiny_vllm.ops.kernels.norm import rms_norm

    c, eps, pdl = place.config, place.config.rms_norm_eps, place.pdl
    out = torch.full((case.rows, c.vocab_size), torch.nan, device=place.device)
    mixes = place.device.type == "cuda" and place.dtype is not torch.float32

    def separate(x: Tensor, norm: Tensor, w: Tensor) -> Tensor:
        x = rms_norm(x, norm, eps, pdl=pdl)
        return torch.mm(x, w.t(), out_dtype=torch.float32) if mixes else (x @ w.t()).float()

    return _product_case(
        case,
        place,
        (c.vocab_size, c.hidden_size),
        lambda x, norm, w: norm_lm_head(x, norm, eps, w, out, pdl=pdl),
        separate,
        lambda x, norm, w: F.linear(_normed(x, norm, eps), w),
    )
