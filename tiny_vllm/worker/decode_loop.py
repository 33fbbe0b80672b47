"""Decoding on the device: a batch whose rows each run one token, step after step.

Token ids, positions, block table and attention plan stay in device memory, and each step
leaves there what the next one reads; a steady step copies nothing to the device. So steps
can be launched before the results of earlier ones are known. A step is captured once per
batch size and shape of plan as a CUDA graph and replayed; without graphs the same
functions run eagerly. Invariant: `_positions` (host) are those of the next launch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiny_vllm.attention.items import MAX_JOINED_ROWS, TILE_ROWS
from tiny_vllm.attention.metadata import AttentionBatch, IntArray
from tiny_vllm.attention.triton_backend import DecodeBuffers, TritonAttention
from tiny_vllm.logger import get_logger
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.ops.kernels.sample import Advance, greedy
from tiny_vllm.ops.memory import to_device
from tiny_vllm.protocol import KvBytes
from tiny_vllm.worker.device_draws import DeviceDraws
from tiny_vllm.worker.input_batch import BatchRow

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_RING = 4  # results in flight
Variant = tuple[int, tuple[int, ...], bool]  # rows, tile classes, merge

logger = get_logger(__name__)


@dataclass(slots=True)
class Ticket:
    """A launched step; `wait` returns its results. ``logits`` hold until the next launch."""

    ids: Tensor
    peaks: Tensor
    logits: Tensor
    done: torch.cuda.Event | None
    kv_bytes: KvBytes
    context_tokens: int

    def wait(self) -> tuple[list[int], list[float]]:
        """(token id, largest logit) of each row."""
        if self.done is not None:
            self.done.synchronize()
        return self.ids.tolist(), self.peaks.tolist()


class DecodeLoop:
    """Runs decode steps of one batch at a time.

    Args:
        max_rows: largest batch; max_blocks: longest block table.
        use_graphs: False runs every step eagerly.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: TritonAttention,
        max_rows: int,
        max_blocks: int,
        max_model_len: int,
        use_graphs: bool,
    ) -> None:
        self._decoder, self._backend = decoder, backend
        self._device, self._max_model_len = backend.device, max_model_len
        self._buckets = [b for b in BUCKETS if b < max_rows] + [max_rows]
        self._buffers = DecodeBuffers(backend, max_rows, max_blocks)
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        self._out_ids = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        self._out_peaks = torch.zeros(max_rows, dtype=torch.float32, device=self._device)
        pin = self._device.type == "cuda"
        self._ring = [
            (
                torch.zeros(max_rows, dtype=torch.int64, pin_memory=pin),
                torch.zeros(max_rows, dtype=torch.float32, pin_memory=pin),
            )
            for _ in range(_RING)
        ]
        self._turn = 0
        # One for all graphs: each would keep its own.
        vocab_size = backend.config.vocab_size
        self._logits = torch.zeros((max_rows, vocab_size), device=self._device)
        self._use_graphs = use_graphs and pin
        self._graphs: dict[Variant, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # memory that all graphs share
        self.graph_memory_bytes = 0
        self._draws = DeviceDraws(max_rows, vocab_size, self._device)
        self._rows: list[BatchRow] = []
        self._tokens_are_stale = False

    def capture_all(self) -> None:
        """Capture the graphs of all usual steps, so that none is captured while serving."""
        if not self._use_graphs:
            return
        before = torch.cuda.memory_reserved(self._device)
        start = time.perf_counter()
        group = self._backend.config.num_heads // self._backend.config.num_kv_heads
        planner = self._backend.planner
        small, wide = planner.tile_rows(1), min(planner.widest, TILE_ROWS[1])
        for bucket in reversed(self._buckets):  # largest first: smaller ones reuse its memory
            for has_parts in (False, True):
                self._graph((bucket, (small,), has_parts))
            if bucket * group > small and wide > small:
                joined = (wide,) if bucket <= MAX_JOINED_ROWS else (small, wide)
                self._graph((bucket, joined, True))
        torch.cuda.synchronize(self._device)
        self.graph_memory_bytes = torch.cuda.memory_reserved(self._device) - before
        logger.info(
            "captured %d CUDA graphs in %.1f s, %.0f MiB",
            len(self._graphs),
            time.perf_counter() - start,
            self.graph_memory_bytes / 2**20,
        )

    def holds(self, rows: Sequence[BatchRow]) -> bool:
        """True when the device state is that of these rows."""
        return self._rows == rows

    def forget(self) -> None:
        """The device state is out of date: rows advanced elsewhere."""
        self._rows = []

    def load(self, rows: list[BatchRow]) -> None:
        """Take over a batch: all its state goes to the device."""
        count = len(rows)
        self._rows = list(rows)
        self._bucket = next(b for b in self._buckets if b >= count)
        self._positions = np.array([r.num_computed_tokens for r in rows], np.int64)
        ends = [r.length_limit(self._max_model_len) for r in rows]
        self._last_position = np.array(ends, np.int64) - 2
        width = max(r.num_blocks for r in rows)
        self._tables = np.zeros((count, width), np.int32)
        for table, row in zip(self._tables, rows, strict=True):
            table[: row.num_blocks] = row.block_ids[: row.num_blocks]
        self._num_blocks = np.array([r.num_blocks for r in rows], np.int64)
        self._buffers.load_table(self._tables)
        padded = np.full(self._bucket, -1, np.int64)
        padded[:count] = self._positions
        self._put(self._buffers.positions, padded)
        self._load_tokens()
        self._draws.load([r.sampling for r in rows])
        self._plan()

    def _put(self, target: Tensor, values: IntArray) -> None:
        target[: len(values)].copy_(to_device(values, self._device))

    def _load_tokens(self) -> None:
        tokens = np.zeros(self._bucket, np.int64)
        tokens[: len(self._rows)] = [r.newest_token_id for r in self._rows]
        self._put(self._token_ids, tokens)
        self._tokens_are_stale = False

    def _plan(self) -> None:
        count = len(self._rows)
        batch = AttentionBatch(np.arange(count + 1), self._positions, self._tables)
        plan, classes, has_parts = self._buffers.load_plan(batch)
        # One form of graph for wide runs, whose tokens always have parts; two without.
        self._variant = (self._bucket, classes, has_parts or len(classes) > 1)
        self._valid_until = plan.valid_until
        self._tokens_read = plan.tokens_read

    def add_blocks(self) -> None:
        """Copy block-table entries that rows got since they were loaded."""
        rows, columns, ids = [], [], []
        for i, row in enumerate(self._rows):
            for j in range(int(self._num_blocks[i]), row.num_blocks):
                rows.append(i)
                columns.append(j)
                ids.append(int(row.block_ids[j]))
            self._num_blocks[i] = row.num_blocks
        if not rows:
            return
        width = max(columns) + 1
        if width > self._tables.shape[1]:
            grow = ((0, 0), (0, width + 8 - self._tables.shape[1]))
            self._tables = np.pad(self._tables, grow)
        self._tables[rows, columns] = ids
        self._buffers.set_blocks(rows, columns, ids)

    def can_run_ahead(self) -> bool:
        """True when the next step is known already: no row ends, all have a block for it."""
        limit = np.minimum(self._last_position, self._num_blocks * self._backend.block_size - 1)
        return bool((self._positions <= limit).all()) and not self._tokens_are_stale

    def launch(self) -> Ticket:
        """Run one token of each row."""
        count = len(self._rows)
        if (self._positions > self._valid_until).any():
            self._plan()
        if self._tokens_are_stale:
            self._load_tokens()
        if self._use_graphs:
            graph, logits = self._graph(self._variant)
            graph.replay()
        else:
            logits = self._body(self._variant)
        self._draws.run(logits, self._out_ids, self._out_peaks, self._token_ids)
        ids, peaks = self._ring[self._turn]
        self._turn = (self._turn + 1) % _RING
        ids[:count].copy_(self._out_ids[:count], non_blocking=True)
        peaks[:count].copy_(self._out_peaks[:count], non_blocking=True)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        context = int(self._positions.sum()) + count
        token_bytes = self._backend.token_bytes
        kv_bytes = KvBytes(context * token_bytes, self._tokens_read * token_bytes)
        self._positions += 1
        self._tokens_read += count
        return Ticket(ids[:count], peaks[:count], logits[:count], done, kv_bytes, context)

    @staticmethod
    def pick(logits: Tensor) -> tuple[list[int], list[float]]:
        """(token id, logit) of the arg-max of rows outside the loop, float32 [N, vocab]."""
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        peaks = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        greedy(logits, ids, peaks)
        return ids.tolist(), peaks.tolist()

    def tokens_were_sampled(self) -> None:
        """The host drew the tokens: they have to be copied before the next launch."""
        self._tokens_are_stale = True

    def _graph(self, variant: Variant) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if variant not in self._graphs:
            self._graphs[variant] = self._capture(variant)
        return self._graphs[variant]

    def _capture(self, variant: Variant) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # Padded rows alone: the run that compiles kernels must leave no trace.
        saved = self._buffers.positions.clone(), self._token_ids.clone()
        self._buffers.positions.fill_(-1)
        with self._buffers.empty_plan():
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                self._body(variant)
            torch.cuda.current_stream(self._device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                logits = self._body(variant)
        self._pool = self._pool or graph.pool()
        self._buffers.positions.copy_(saved[0])
        self._token_ids.copy_(saved[1])
        return graph, logits

    def _body(self, variant: Variant) -> Tensor:
        """The step itself; only device state goes in and out."""
        num_rows, classes, has_parts = variant
        step = self._buffers.step(num_rows, classes, has_parts)
        token_ids, positions = self._token_ids[:num_rows], step.positions
        hidden = self._decoder.forward_fused(token_ids, positions, step)
        logits = self._decoder.logits(hidden, self._logits[:num_rows])
        state = Advance(positions, token_ids)
        greedy(logits, self._out_ids[:num_rows], self._out_peaks[:num_rows], advance=state)
        return logits
