"""The runner's own copy of the running requests, kept up to date by messages.

Owns token ids and block tables as arrays, so that a step builds its flat batch with a
few copies. Knows neither the scheduler nor the model. Invariant: a row's
``num_tokens`` counts known tokens; sampled ones are appended here.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tiny_vllm.attention.metadata import AttentionBatch
from tiny_vllm.outputs import TokenLogprobs
from tiny_vllm.protocol import NewRequestData, SchedulerOutput
from tiny_vllm.request import BlockId, RequestId
from tiny_vllm.sampler import SamplingRow, make_generator, request_seed

_GROWTH = 256


class BatchRow:
    """One request as the runner sees it."""

    def __init__(self, data: NewRequestData, engine_seed: int, device: torch.device) -> None:
        self.request_id = data.request_id
        self.params = data.params
        self._prompt_token_ids = data.prompt_token_ids
        self._output_token_ids = list(data.output_token_ids)
        self.num_prompt_tokens = len(data.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens + len(data.output_token_ids)
        self.block_ids = np.array(data.block_ids, dtype=np.int32)
        self.num_blocks = len(data.block_ids)
        self.num_computed_tokens = data.num_computed_tokens
        seed = request_seed(data.params, engine_seed, data.request_id)
        self.prompt_logprobs: list[TokenLogprobs | None] = []  # grows chunk by chunk
        self.sampling = SamplingRow(
            params=data.params,
            prompt_token_ids=data.prompt_token_ids,
            output_token_ids=self._output_token_ids,
            eos_token_ids=data.eos_token_ids,
            generator=None if data.params.is_greedy else make_generator(seed, device),
        )

        params = data.params
        # Drawn from the logits as they are, and nobody asks what else was likely: the
        # device can draw by itself.
        is_plain = params.logprobs is None and not params.min_tokens
        self.is_plain = is_plain and not self.sampling.edits_logits
        self.is_plain_greedy = self.is_plain and params.is_greedy

    def length_limit(self, max_model_len: int) -> int:
        """Tokens at which the request ends, whatever they are."""
        if self.params.max_tokens is None:
            return max_model_len
        return min(max_model_len, self.num_prompt_tokens + self.params.max_tokens)

    def token_ids(self, start: int, end: int) -> Sequence[int]:
        """Known tokens at positions start .. end - 1."""
        split = self.num_prompt_tokens
        if end <= split:
            return self._prompt_token_ids[start:end]
        if start >= split:
            return self._output_token_ids[start - split : end - split]
        return [*self._prompt_token_ids[start:], *self._output_token_ids[: end - split]]

    @property
    def newest_token_id(self) -> int:
        """The last known token: what a decode runs."""
        return self._output_token_ids[-1] if self._output_token_ids else self._prompt_token_ids[-1]

    def append_token(self, token_id: int) -> None:
        """Add a sampled token."""
        self.num_tokens += 1
        self._output_token_ids.append(token_id)

    def append_blocks(self, block_ids: list[BlockId]) -> None:
        """Extend the block table."""
        end = self.num_blocks + len(block_ids)
        if end > len(self.block_ids):
            self.block_ids = np.resize(self.block_ids, end + _GROWTH)
        self.block_ids[self.num_blocks : end] = block_ids
        self.num_blocks = end


class StepBatch:
    """The flat batch of one step, in the scheduler's order."""

    def __init__(self, rows: list[BatchRow], counts: list[int]) -> None:
        self.rows = rows
        lens = np.array(counts, dtype=np.int64)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lens, out=query_start_loc[1:])
        computed = np.array([row.num_computed_tokens for row in rows], dtype=np.int64)
        width = max(row.num_blocks for row in rows)
        tables = np.full((len(rows), width), -1, dtype=np.int32)
        for table, row in zip(tables, rows, strict=True):
            table[: row.num_blocks] = row.block_ids[: row.num_blocks]
        self.attention = AttentionBatch(query_start_loc, computed, tables)
        self.ends = computed + lens

    def input_ids(self) -> npt.NDArray[np.int64]:
        """Token ids of the flat batch, [T]."""
        computed = self.attention.num_computed
        token_ids: list[int] = []
        for row, start, end in zip(self.rows, computed.tolist(), self.ends.tolist(), strict=True):
            token_ids.extend(row.token_ids(start, end))
        return np.array(token_ids, np.int64)

    def sampled_rows(self) -> list[int]:
        """Rows whose last scheduled token is their last known one: they get a new token."""
        return [
            i
            for i, (row, end) in enumerate(zip(self.rows, self.ends.tolist(), strict=True))
            if end == row.num_tokens
        ]

    def __iter__(self) -> Iterator[BatchRow]:
        return iter(self.rows)


class InputBatch:
    """All requests the runner holds, by id."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._rows: dict[RequestId, BatchRow] = {}
        self._seed, self._device = seed, device

    def update(self, step: SchedulerOutput) -> tuple[list[BatchRow], bool]:
        """Apply a step's messages; return its rows and whether a row got new blocks."""
        for request_id in step.removed_request_ids:
            self._rows.pop(request_id, None)
        for new in step.new_requests:
            self._rows[new.request_id] = BatchRow(new, self._seed, self._device)
        grew = False
        for cached in step.cached_requests:
            row = self._rows[cached.request_id]
            row.num_computed_tokens = cached.num_computed_tokens
            if cached.new_block_ids:
                row.append_blocks(cached.new_block_ids)
                grew = True
        return [self._rows[request_id] for request_id in step.num_scheduled_tokens], grew
