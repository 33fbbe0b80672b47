"""The data plane of the baseline: the decoder over contiguous slots, and what a step reads.

Knows tensors and slots, no queue and no reasons to finish. A slot's KV holds the first
tokens of its request; the newest token is the one that a decode runs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiny_vllm.config import ModelConfig
from tiny_vllm.layers.decoder_layer import Attend
from tiny_vllm.models.loader import LoadedModel
from tiny_vllm.origin.attention import DecodeAttention, PrefillAttention, kernels
from tiny_vllm.origin.kv_cache import ContiguousKvCache
from tiny_vllm.outputs import TokenLogprobs
from tiny_vllm.protocol import KvBytes, SampledToken
from tiny_vllm.sampler import SampleError, Sampler, SamplingRow, prompt_logprobs

_LOGIT_ROWS = 256  # rows of logits held at once for prompt log-probabilities


@dataclass(slots=True)
class SlotStep:
    """What a step produced and cost. ``sampled`` is in the order of the rows."""

    sampled: list[SampledToken | SampleError]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    kv_bytes: KvBytes = field(default_factory=KvBytes)
    attention_context_tokens: int = 0
    num_logit_rows: int = 0


class SlotRunner:
    """Runs prefills and decodes on ``num_slots`` slots of ``max_model_len`` tokens."""

    def __init__(self, loaded: LoadedModel, num_slots: int) -> None:
        assert loaded.config.max_model_len is not None
        self._decoder, self._model, self._device = (
            loaded.decoder,
            loaded.model_config,
            loaded.device,
        )
        self._cache = ContiguousKvCache(
            loaded.model_config,
            num_slots,
            loaded.config.max_model_len,
            loaded.dtype,
            loaded.device,
        )
        self._kv_bytes_per_token = loaded.model_config.kv_bytes_per_token(loaded.config.dtype)
        self._sampler = Sampler()

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Give the KV of ``num_tokens`` tokens a new slot."""
        self._cache.move(source, target, num_tokens)

    def prefill(self, slot: int, row: SamplingRow) -> SlotStep:
        """Run the whole prompt of ``row`` into ``slot`` and sample its first token."""
        prompt = row.prompt_token_ids
        attention = PrefillAttention(self._cache, self._model, slot)
        hidden = self._forward(prompt, range(len(prompt)), attention)
        step = self._finish(hidden[-1:], [row], [(0, len(prompt))])
        if row.params.prompt_logprobs is not None:
            step.prompt_logprobs = self._prompt_logprobs(hidden, row)
            step.num_logit_rows = len(prompt)
        return step

    def decode(self, rows: Sequence[SamplingRow]) -> SlotStep:
        """Run the newest token of the requests in slots 0..n-1 and sample the next ones."""
        lengths = [len(row.prompt_token_ids) + len(row.output_token_ids) for row in rows]
        attention = DecodeAttention(self._cache, self._model, lengths)
        newest = [row.output_token_ids[-1] for row in rows]
        hidden = self._forward(newest, [length - 1 for length in lengths], attention)
        return self._finish(hidden, rows, [(length - 1, length) for length in lengths])

    def _forward(
        self, token_ids: Sequence[int], positions: Sequence[int], attend: Attend
    ) -> Tensor:
        flat = torch.tensor([list(token_ids), list(positions)], device=self._device)
        with kernels():
            return self._decoder.forward(flat[0], flat[1], attend)

    def _finish(
        self, hidden: Tensor, rows: Sequence[SamplingRow], spans: Sequence[tuple[int, int]]
    ) -> SlotStep:
        sampled = self._sampler.sample(self._decoder.logits(hidden), rows)
        num_read, num_attended = context_tokens(self._model, spans)
        num_bytes = num_read * self._kv_bytes_per_token // self._model.num_layers
        return SlotStep(
            sampled,
            kv_bytes=KvBytes(num_bytes, num_bytes),
            attention_context_tokens=num_attended // self._model.num_layers,
            num_logit_rows=len(rows),
        )

    def _prompt_logprobs(self, hidden: Tensor, row: SamplingRow) -> list[TokenLogprobs | None]:
        prompt, num_top = row.prompt_token_ids, row.params.prompt_logprobs or 0
        result: list[TokenLogprobs | None] = [None]
        for start in range(0, len(prompt) - 1, _LOGIT_ROWS):
            stop = min(start + _LOGIT_ROWS, len(prompt) - 1)
            logits = self._decoder.logits(hidden[start:stop])
            result += prompt_logprobs(logits, prompt[start + 1 : stop + 1], num_top)
        return result


def context_tokens(model: ModelConfig, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Sums over all layers: tokens of KV read, and tokens attended to by each token run.

    Args:
        spans: for each request the positions [start, stop) that run in this step.
    """
    num_read = num_attended = 0
    windows = Counter(model.layer_window(layer) for layer in range(model.num_layers))
    for window, num_layers in windows.items():
        for start, stop in spans:
            reach = stop if window is None else window
            num_read += num_layers * (stop - max(0, start + 1 - reach))
            last_full = min(max(reach, start), stop)  # up to here all that came before is seen
            triangle = (last_full * (last_full + 1) - start * (start + 1)) // 2
            num_attended += num_layers * (triangle + (stop - last_full) * reach)
    return num_read, num_attended
