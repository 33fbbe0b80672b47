"""Drawing of tokens on the device, for the rows of a decode loop that are not greedy.

The draws are those of `tiny_vllm.sampler.Sampler`: a function of seed, position and token
id. What they need stays in device memory and moves on with each step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tiny_vllm.ops.kernels.sample import Advance, gumbel
from tiny_vllm.ops.kernels.sample_filter import Filters
from tiny_vllm.ops.kernels.sample_peak import make_workspace
from tiny_vllm.ops.memory import to_device
from tiny_vllm.sampler import SamplingRow

_MASK64 = (1 << 64) - 1


class DeviceDraws:
    """Sampling parameters of a batch; runs behind the arg-max, which greedy rows keep."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._workspace = make_workspace(max_rows, vocab_size, device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)  # not padded
        self._num_rows = 0  # none while all are greedy
        self._filters: Filters | None = None

    def load(self, rows: Sequence[SamplingRow]) -> None:
        """Take over the rows of a batch."""
        self._num_rows = 0
        if all(row.params.is_greedy for row in rows):
            return
        self._num_rows = len(rows)
        self._temperatures = self._floats([row.params.temperature for row in rows])
        seeds = [0 if r.generator is None else r.generator.initial_seed() & _MASK64 for r in rows]
        self._seeds = to_device(np.array(seeds, np.uint64).view(np.int64), self._device)
        counts = np.array([len(row.output_token_ids) for row in rows], np.int64)
        self._num_outputs = to_device(counts, self._device)
        self._filters = None
        if any(row.filters_logits for row in rows):
            top_k = np.array([max(0, row.params.top_k) for row in rows], np.int32)
            self._filters = Filters(
                to_device(top_k, self._device),
                self._floats([row.params.top_p for row in rows]),
                to_device(np.array([row.params.min_p for row in rows], np.float64), self._device),
            )

    def _floats(self, values: Sequence[float]) -> Tensor:
        return to_device(np.array(values, np.float32), self._device)

    def run(self, logits: Tensor, out_ids: Tensor, out_peaks: Tensor, token_ids: Tensor) -> None:
        """Draw over the arg-max of the step: ``out_ids`` and ``token_ids``, int64 [max_rows].

        Args:
            logits: float32 [at least the batch, vocab].
        """
        count = self._num_rows
        if not count:
            return
        gumbel(
            logits[:count],
            self._temperatures,
            self._seeds,
            self._num_outputs,
            out_ids[:count],
            out_peaks[:count],
            filters=self._filters,
            advance=Advance(self._positions[:count], token_ids[:count]),
            workspace=self._workspace,
        )
