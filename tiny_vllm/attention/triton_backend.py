"""Prefix-forest attention on a GPU: plans as flat arrays in device memory, Triton kernels.

Owns the KV pool, with K and V of a layer ``[kv_heads, num_blocks * block_size, head_dim]``
as in the torch backend. `TritonAttention.plan` serves any step; a `DecodeBuffers` keeps the
plan of a decoding batch at fixed addresses, so that a CUDA graph replays whatever the
forest looks like.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tiny_vllm.attention.items import TILE_ROWS, ItemPlan, ItemPlanner
from tiny_vllm.attention.long_prefill import LongChunk, LongPrefill
from tiny_vllm.attention.metadata import AttentionBatch, IntArray, copied_slots
from tiny_vllm.config import ModelConfig
from tiny_vllm.ops.kernels.attention import (
    MANY_TOKENS,
    TileConfig,
    forest_attention,
    max_tile_rows,
    merge_parts,
    tile_config,
)
from tiny_vllm.ops.kernels.launch import use_pdl
from tiny_vllm.ops.kernels.rotary import rotary_store
from tiny_vllm.ops.memory import copy_slots
from tiny_vllm.ops.rotary import RotaryEmbedding
from tiny_vllm.protocol import BlockCopy, KvBytes

_ALIGN = 32  # int32 entries: arrays of one upload start at 128 bytes
_MAX_DECODE_ITEMS = 8192
_DECODE_PART_BYTES = 256 << 20
_STEP_PARTS = 3  # partial results a token, for which a long step has room
_INTERPRETER_SMS = 2


def upload(arrays: list[IntArray], device: torch.device) -> list[Tensor]:
    """Copy int32 arrays to the device in one transfer, without waiting for it."""
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.size // _ALIGN) * _ALIGN)
    host = torch.empty(max(offsets[-1], 1), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for array, start in zip(arrays, offsets, strict=False):
        flat[start : start + array.size] = array.ravel()
    packed = host.to(device, non_blocking=True)
    return [
        packed[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, offsets, strict=False)
    ]


@dataclass(slots=True)
class TritonStep:
    """What the layers of one step read, all on the device; `FusedAttend` of that step.

    Attributes:
        items: tile rows -> (int32 [n, 8], programs of the grid, how the kernel is compiled).
        counts: int32 [classes], items of each class in the order of TILE_ROWS.
        has_parts: some token is merged from partial results.
        is_decode: every row is one token, and an item of it has the open end.
    """

    backend: "TritonAttention"
    positions: Tensor
    rows: Tensor
    block_table: Tensor
    items: dict[int, tuple[Tensor, int, TileConfig]]
    counts: Tensor
    q_index: Tensor
    part_start: Tensor
    parts: tuple[Tensor, Tensor]
    has_parts: bool
    long_chunks: list[LongChunk] = field(default_factory=list)
    is_decode: bool = False

    def attend_qkv(
        self,
        layer: int,
        qkv: Tensor,
        rotary: RotaryEmbedding,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        """See `tiny_vllm.layers.decoder_layer.FusedAttend`."""
        backend, config = self.backend, self.backend.config
        keys, values = backend.keys[layer], backend.values[layer]
        cos, sin = rotary.tables
        heads, head_dim = config.num_heads, config.head_dim
        rotate = None
        # Where only narrow tiles run, the attention kernel rotates on its way (measured).
        if self.is_decode and norms is None and set(self.items) == {TILE_ROWS[0]}:
            q, rotate = qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim)), (cos, sin)
        else:
            q_norm, k_norm, eps = norms if norms is not None else (None, None, 0.0)
            q = rotary_store(
                qkv, self.positions, self.rows, self.block_table, cos, sin, keys, values,
                num_heads=heads, block_size=backend.block_size,
                q_norm=q_norm, k_norm=k_norm, eps=eps, pdl=backend.pdl,
            )  # fmt: skip
        out = torch.empty((len(q), heads, head_dim), dtype=q.dtype, device=q.device)
        for rows, (items, programs, tile) in self.items.items():
            forest_attention(
                q, keys, values, out, self.parts, items, self.counts, self.q_index,
                self.positions, self.part_start, self.block_table,
                scale=backend.scale, block_size=backend.block_size, block_m=rows,
                class_index=TILE_ROWS.index(rows), num_programs=programs, config=tile,
                window=config.layer_window(layer), rotate=rotate, pdl=backend.pdl,
            )  # fmt: skip
        if self.has_parts:
            merge_parts(self.parts, self.part_start, out, pdl=backend.pdl)
        for chunk in self.long_chunks:
            backend.long_prefill.run(chunk, q, keys, values, out)
        return out.view(out.shape[0], -1)


class TritonAttention:
    """The Triton backend. ``share=False`` is its per-request twin.

    Args:
        config: shape of the model.
        num_blocks, block_size: size of the KV pool.
        max_tokens: tokens of the longest step.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        share: bool = True,
        max_tokens: int = 8192,
    ) -> None:
        self._step_part_bytes = step_part_bytes(config, max_tokens)
        self.config, self.block_size, self.device = config, block_size, device
        self.scale = config.head_dim**-0.5
        self._dtype = dtype
        self.token_bytes = config.kv_bytes_per_token(str(dtype).split(".")[-1])
        shape = (config.num_layers, config.num_kv_heads, num_blocks * block_size, config.head_dim)
        self._caches = (
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )
        self.keys, self.values = (cache.unbind() for cache in self._caches)
        sms, capability = _device_facts(device)
        self._sms, self._capability = sms, capability
        self.pdl = use_pdl(device)
        self.long_prefill = LongPrefill(config, block_size, dtype, device)
        group = config.num_heads // config.num_kv_heads
        widest = max_tile_rows(config.head_dim, dtype)
        self.planner = ItemPlanner(
            group, config.num_kv_heads, block_size, 2 * sms, share=share, max_tile_rows=widest
        )

    def plan(self, batch: AttentionBatch) -> tuple[TritonStep, KvBytes]:
        """Plan a step of any kind."""
        is_long = self.long_prefill.takes(batch)
        plan = self.planner.build(batch, self._fits, skip=is_long)
        row_of_token = np.repeat(np.arange(len(batch.num_computed)), batch.query_lens)
        counts = _counts(plan)
        arrays = [batch.positions(), row_of_token, batch.block_tables, plan.q_index]
        arrays += [plan.part_start, counts, *plan.items.values()]
        positions, rows, table, q_index, part_start, counts_there, *items = upload(
            arrays, self.device
        )
        by_class = {}
        for i, (tile_rows, table_of) in enumerate(plan.items.items()):
            works = len(table_of) * self.config.num_kv_heads
            tile, programs = self.tile(tile_rows, works)
            by_class[tile_rows] = (items[i], min(programs, works), tile)
        step = TritonStep(
            self, positions, rows, table, by_class, counts_there, q_index, part_start,
            self.new_parts(plan.num_slots), plan.num_slots > 0,
            self.long_prefill.chunks(batch, is_long),
        )  # fmt: skip
        return step, self.kv_bytes(batch, plan)

    def warm_up(self, forward: Callable[..., Tensor], max_tokens: int) -> None:
        """Compile and plan what steps outside the decode loop need; nothing is stored.

        Args:
            forward: the decoder's fused pass, (input ids, positions, step).
        """
        self.long_prefill.warm_up(max_tokens, self.keys[0])
        # Padded tokens: too many for the products of a few rows, then also for the merge of few.
        for count in (2 * TILE_ROWS[0], MANY_TOKENS):
            self._warm_up_kernels(forward, count)

    def _warm_up_kernels(self, forward: Callable[..., Tensor], count: int) -> None:
        arrays = [np.full(count, -1), np.zeros(count), np.zeros((1, 1)), np.zeros(count)]
        arrays += [np.zeros(count + 1), np.zeros(len(TILE_ROWS)), np.zeros((1, 8))]
        positions, rows, table, q_index, starts, counts, items = upload(arrays, self.device)
        ids = torch.zeros(count, dtype=torch.int64, device=self.device)
        for num_works in (0, 1 << 30):
            usual = [m for m in TILE_ROWS if m <= self.planner.widest]
            classes = {m: (items, 1, self.tile(m, num_works)[0]) for m in usual}
            step = TritonStep(
                self, positions, rows, table, classes, counts, q_index, starts,
                self.new_parts(1), True,
            )  # fmt: skip
            forward(ids, positions, step)

    def tile(self, tile_rows: int, num_works: int) -> tuple[TileConfig, int]:
        """How to compile a tile class, and the programs that fill the GPU with it."""
        is_busy = num_works > 4 * self._sms
        tile = tile_config(tile_rows, self.config.head_dim, self._dtype, self._capability, is_busy)
        return tile, self._sms * tile.programs_per_sm

    def _fits(self, plan: ItemPlan) -> bool:
        """Partial results of a step outside the decode loop stay within what was set aside."""
        return plan.num_slots * part_bytes(self.config) <= self._step_part_bytes

    def new_parts(self, num_slots: int) -> tuple[Tensor, Tensor]:
        """Room for partial results, not initialised."""
        heads, head_dim = self.config.num_heads, self.config.head_dim
        shape = (max(num_slots, 1), heads, head_dim)
        out = torch.empty(shape, dtype=torch.float32, device=self.device)
        return out, torch.empty(shape[:2], dtype=torch.float32, device=self.device)

    def kv_bytes(self, batch: AttentionBatch, plan: ItemPlan) -> KvBytes:
        """Bytes that per-request attention would read, and that ``plan`` reads."""
        logical = int((batch.num_computed + batch.query_lens).sum())
        return KvBytes(logical * self.token_bytes, plan.tokens_read * self.token_bytes)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `AttentionBackend`."""
        source, target = copied_slots(copies, self.block_size, self.device)
        for cache in self._caches:
            copy_slots(cache, source, target)

    def scrub(self, block_ids: IntArray) -> None:
        """Nothing to do: the kernel never multiplies by what a request may not see."""


def part_bytes(config: ModelConfig) -> int:
    """Bytes of one partial result: float32 output and log-sum-exp of all heads."""
    return 4 * config.num_heads * (config.head_dim + 1)


def step_part_bytes(config: ModelConfig, max_tokens: int) -> int:
    """Memory that the partial results of a step outside the decode loop may take."""
    return max(_DECODE_PART_BYTES, _STEP_PARTS * max_tokens * part_bytes(config))


def working_bytes(config: ModelConfig, max_tokens: int) -> int:
    """Memory of the backend beside the KV pool, at most."""
    return _DECODE_PART_BYTES + step_part_bytes(config, max_tokens)


def _counts(plan: ItemPlan) -> IntArray:
    """Items of each class, in the order of TILE_ROWS."""
    return np.array([len(plan.items.get(rows, ())) for rows in TILE_ROWS], np.int32)


def _device_facts(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return _INTERPRETER_SMS, 0
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_properties(device).multi_processor_count, 10 * major + minor


class DecodeBuffers:
    """The plan of a decoding batch at fixed addresses.

    Token i of the batch is row i of the block table. Rows past the batch are padded: their
    position is negative, nothing is stored and no item names them.

    Args:
        max_rows: largest batch; max_blocks: longest block table.
    """

    def __init__(self, backend: TritonAttention, max_rows: int, max_blocks: int) -> None:
        self._backend, self.max_rows = backend, max_rows
        device = backend.device
        self.positions = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self._rows = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._table = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        config = backend.config
        self._max_slots = _DECODE_PART_BYTES // part_bytes(config)
        self._parts = backend.new_parts(self._max_slots)
        sizes = [
            max_rows + 1,
            len(TILE_ROWS),
            max_rows * 16,
            *[_MAX_DECODE_ITEMS * 8] * len(TILE_ROWS),
        ]
        self._ints = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        views = self._ints.split(sizes)
        self._part_start, self._counts, self._q_index = views[:3]
        self._items = dict(zip(TILE_ROWS, (v.view(-1, 8) for v in views[3:]), strict=True))

    def load_plan(self, batch: AttentionBatch) -> tuple[ItemPlan, tuple[int, ...], bool]:
        """Plan ``batch`` and copy the plan; the copy is ordered after what was launched.

        Returns:
            (plan, tile classes with items, whether anything is merged).
        """
        plan = self._backend.planner.build(batch, self._fits)
        # Padded tokens own no slots.
        tail = np.full(self.max_rows + 1 - len(plan.part_start), plan.num_slots, np.int32)
        targets = [self._part_start, self._counts, self._q_index[: plan.q_index.size]]
        arrays = [np.concatenate((plan.part_start, tail)), _counts(plan), plan.q_index]
        for rows, table in plan.items.items():
            targets.append(self._items[rows][: len(table)])
            arrays.append(table)
        for target, source in zip(targets, upload(arrays, self._backend.device), strict=True):
            target.copy_(source)
        return plan, tuple(sorted(plan.items)), plan.num_slots > 0

    @contextmanager
    def empty_plan(self) -> Iterator[None]:
        """Run kernels without any work: for compiling and capturing."""
        saved = self._counts.clone(), self._part_start.clone()
        self._counts.zero_()
        self._part_start.zero_()
        yield
        self._counts.copy_(saved[0])
        self._part_start.copy_(saved[1])

    def _fits(self, plan: ItemPlan) -> bool:
        return plan.num_slots <= self._max_slots and all(
            len(table) <= _MAX_DECODE_ITEMS for table in plan.items.values()
        )

    def load_table(self, tables: IntArray) -> None:
        """Copy the block tables of a batch, int32 [B, width]."""
        (source,) = upload([tables], self._backend.device)
        self._table[: tables.shape[0], : tables.shape[1]].copy_(source)

    def set_blocks(self, rows: list[int], columns: list[int], block_ids: list[int]) -> None:
        """Write single entries of the block table."""
        entries = np.array([rows, columns, block_ids], np.int32)
        (source,) = upload([entries], self._backend.device)
        self._table.index_put_((source[0].long(), source[1].long()), source[2])

    def step(self, num_rows: int, classes: tuple[int, ...], has_parts: bool) -> TritonStep:
        """The step that a graph of ``num_rows`` rows captures."""
        backend = self._backend
        items = {}
        for rows in classes:
            tile, programs = backend.tile(rows, num_rows * backend.config.num_kv_heads)
            items[rows] = (self._items[rows], programs, tile)
        return TritonStep(
            backend, self.positions[:num_rows], self._rows[:num_rows], self._table, items,
            self._counts, self._q_index, self._part_start, self._parts, has_parts,
            is_decode=True,
        )  # fmt: skip
