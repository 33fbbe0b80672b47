"""Prepares attention over a paged cache for `bench.kernels`. Imports torch.

Each copy of the buffers is a layer of the KV pool. Steps are planned once, outside the clock,
by `TritonAttention.plan`; every step runs as the layers of the engine run it.
"""

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.bench.kernel_cases import Case, Traffic
from tiny_vllm.bench.kernel_timing import Built, Call, Place, fault

if TYPE_CHECKING:
    from tiny_vllm.attention.metadata import AttentionBatch, IntArray
    from tiny_vllm.attention.triton_backend import TritonAttention, TritonStep

PER_REQUEST = "per request"
FLASH, CUDNN, LONG = "SDPA flash", "SDPA cuDNN", "engine (cuDNN)"
MAX_LAYERS = 16  # of a prefill: bound by FLOPs, not by where its data lies


def attend(step: "TritonStep", q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """The attention of one layer: a step's own ``attend_qkv``, with q rotated and KV stored."""
    from tiny_vllm.attention.items import TILE_ROWS
    from tiny_vllm.ops.kernels.attention import forest_attention, merge_parts

    backend = step.backend
    for rows, (items, programs, tile) in step.items.items():
        forest_attention(
            q, keys, values, out, step.parts, items, step.counts, step.q_index,
            step.positions, step.part_start, step.block_table,
            scale=backend.scale, block_size=backend.block_size, block_m=rows,
            class_index=TILE_ROWS.index(rows), num_programs=programs, config=tile,
            window=None, pdl=backend.pdl,
        )  # fmt: skip
    if step.has_parts:
        merge_parts(step.parts, step.part_start, out, pdl=backend.pdl)


def block_tables(traffic: Traffic, block_size: int) -> "IntArray":
    """int32 [B, width]: blocks in the order of a fresh pool, requests of a document together."""
    shared = np.arange(-(-traffic.common // block_size))
    each = -(-traffic.prefix // block_size)
    own = -(-(traffic.context) // block_size) - len(shared) - each
    next_block, rows = len(shared), []
    for _ in range(traffic.documents):
        document = np.arange(next_block, next_block + each)
        next_block += each
        for _ in range(traffic.per_document):
            rows.append(np.concatenate((shared, document, np.arange(next_block, next_block + own))))
            next_block += own
    return np.array(rows, np.int32)


def _backend(
    place: Place, layers: int, num_blocks: int, block_size: int, *, share: bool = True
) -> "TritonAttention":
    from tiny_vllm.attention.triton_backend import TritonAttention

    config = dataclasses.replace(place.config, num_layers=layers, sliding_window=None)
    shape = (config, num_blocks, block_size, place.dtype, place.device)
    return TritonAttention(*shape, share=share)


def _fill(backend: "TritonAttention") -> None:
    for cache in (*backend.keys, *backend.values):
        cache.normal_()


def _plan_us(backend: "TritonAttention", batch: "AttentionBatch") -> float:
    """Microseconds of the host to plan a step and start its upload, without the first time."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        backend.plan(batch)
        times.append(time.perf_counter() - start)
    return 1e6 * median(times[1:])


def _exact(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, tokens: list[int], lens: list[int]
) -> Tensor:
    """The definition in float32 for some tokens.

    Args:
        q: [T, heads, d]; keys, values: [kv_heads, slots, d]
        slots: [len(tokens), context], cache slots of the keys; ``lens`` says how many count.
    """
    group = q.shape[1] // keys.shape[0]
    results = []
    for token, places, length in zip(tokens, slots, lens, strict=True):
        k, v = (x[:, places[:length]].float() for x in (keys, values))  # [kv_heads, length, d]
        grouped = q[token].float().view(k.shape[0], group, -1)
        scores = grouped @ k.transpose(1, 2) * q.shape[2] ** -0.5
        results.append((scores.softmax(-1) @ v).flatten(0, 1))
    return torch.stack(results)


def decode_case(case: Case, place: Place) -> Built:
    from tiny_vllm.attention.metadata import AttentionBatch

    traffic, size, batch_size = case.traffic, case.block_size, case.rows
    assert traffic is not None
    tables = block_tables(traffic, size)
    copies = place.copies(case.num_bytes)
    backend = _backend(place, copies, int(tables.max()) + 1, size)
    alone = _backend(place, 1, 1, size, share=False)  # it reads the pool of the other
    _fill(backend)
    computed = np.full(batch_size, traffic.context - 1)
    batch = AttentionBatch(np.arange(batch_size + 1), computed, tables)
    (step, read), (step_alone, _) = backend.plan(batch), alone.plan(batch)
    q = place.random(batch_size, place.config.num_heads, place.config.head_dim)
    out = torch.empty_like(q)

    def call(chosen: "TritonStep") -> Callable[[int], None]:
        return lambda i: attend(chosen, q, backend.keys[i], backend.values[i], out)

    def check() -> str | None:
        tokens = sorted({0, batch_size // 2, batch_size - 1})
        position = np.arange(traffic.context)
        places = tables[tokens].astype(np.int64)[:, position // size] * size + position % size
        slots = torch.from_numpy(places).to(place.device)
        lens = [traffic.context] * len(tokens)
        want = _exact(q, backend.keys[0], backend.values[0], slots, tokens, lens)
        for name, chosen in (("forest", step), (PER_REQUEST, step_alone)):
            out.fill_(torch.nan)
            call(chosen)(0)
            found = fault(out[tokens], want, place.dtype)
            if found or not bool(out.isfinite().all()):
                return f"{name}: {found or 'the result is not finite'}"
        return None

    facts = {
        "plan_us": _plan_us(backend, batch),
        "planned_bytes": read.physical / copies,
        "per_request_bytes": read.logical / copies,
    }
    return Built(call(step), {PER_REQUEST: call(step_alone)}, check, copies, facts=facts)


def prefill_case(case: Case, place: Place) -> Built:
    from tiny_vllm.attention.metadata import AttentionBatch

    tokens, size = case.rows, case.block_size
    copies = min(place.copies(case.num_bytes), MAX_LAYERS)
    num_blocks = -(-tokens // size)
    backend = _backend(place, copies, num_blocks, size)
    _fill(backend)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    batch = AttentionBatch(np.array([0, tokens]), np.zeros(1, np.int64), table)
    runs_long = bool(backend.long_prefill.takes(batch).any())
    long_step = backend.plan(batch)[0] if runs_long else None
    backend.long_prefill.is_enabled = False  # the kernel itself, whatever the engine would take
    step, _ = backend.plan(batch)
    q = place.random(tokens, place.config.num_heads, place.config.head_dim)
    out = torch.empty_like(q)

    def check() -> str | None:
        chosen = sorted({0, 1, tokens // 3, tokens - 2, tokens - 1})
        slots = torch.arange(tokens, device=place.device).expand(len(chosen), -1)
        lens = [token + 1 for token in chosen]
        want = _exact(q, backend.keys[0], backend.values[0], slots, chosen, lens)
        out.fill_(torch.nan)
        kernel(0)
        if not bool(out.isfinite().all()):
            return "the result is not finite"
        # By row: the first ones are much larger than the last.
        faults = (fault(out[t], row, place.dtype) for t, row in zip(chosen, want, strict=True))
        return next((f for f in faults if f), None)

    def kernel(i: int) -> None:
        attend(step, q, backend.keys[i], backend.values[i], out)

    references = _prefill_references(q, backend, tokens, place)
    if long_step is not None:
        (chunk,) = long_step.long_chunks
        references[LONG] = lambda i: backend.long_prefill.run(
            chunk, q, backend.keys[i], backend.values[i], out
        )
    # cuDNN's first call of a shape plans, so nothing here is captured.
    return Built(kernel, references, check, copies, captures=False, references_capture=False)


def _prefill_references(
    q: Tensor, backend: "TritonAttention", tokens: int, place: Place
) -> dict[str, Call]:
    """torch's kernels, on the pool itself: its blocks lie in order."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tiny_vllm.ops.attention import attention_cudnn

    queries = q.transpose(0, 1)[None].contiguous()
    keys, values = ([x[None, :, :tokens] for x in pool] for pool in (backend.keys, backend.values))
    scale = backend.scale

    def flash(i: int) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(
                queries, keys[i], values[i], is_causal=True, scale=scale, enable_gqa=True
            )

    def cudnn(i: int) -> Tensor:
        return attention_cudnn(queries, keys[i], values[i], scale, causal=True)[0]

    is_short = place.dtype in (torch.float16, torch.bfloat16)
    return {FLASH: flash, CUDNN: cudnn} if place.device.type == "cuda" and is_short else {}
