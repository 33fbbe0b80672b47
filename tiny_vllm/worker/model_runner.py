"""Runs one step: messages in, sampled tokens out.

Owns the model, the KV tensors (through the attention backend) and the sampler. It
knows nothing of scheduling or caching policy: blocks and counts arrive decided.
"""

import torch
from torch import Tensor

from tiny_vllm.attention.metadata import AttentionBackend, IntArray
from tiny_vllm.attention.torch_backend import TorchAttention
from tiny_vllm.models.loader import LoadedModel
from tiny_vllm.protocol import ModelRunnerOutput, SampledToken, SchedulerOutput
from tiny_vllm.sampler import Sampler, prompt_logprobs
from tiny_vllm.worker.input_batch import BatchRow, InputBatch, StepBatch

_LOGIT_ROWS = 128  # prompt log-probabilities: rows of logits held at a time


class ModelRunner:
    """The data plane of one device."""

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend) -> None:
        self._decoder = loaded.decoder
        self._device = loaded.device
        self._backend = backend
        self._batch = InputBatch(loaded.config.seed, loaded.device)
        self._sampler = Sampler()

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run the scheduled tokens through the model and sample where a row is complete."""
        batch = self._batch.update(scheduler_output)
        if batch is None:
            return ModelRunnerOutput()
        attend, kv_bytes = self._backend.plan(batch.attention)
        hidden = self._decoder.forward(
            self._to_device(batch.input_ids()), self._to_device(batch.attention.positions()), attend
        )
        output = ModelRunnerOutput(
            num_forward_tokens=batch.attention.num_tokens,
            kv_bytes=kv_bytes,
            attention_context_tokens=int((batch.attention.positions() + 1).sum()),
        )
        self._collect_prompt_logprobs(batch, hidden, output)
        self._sample(batch, hidden, output)
        return output

    def _to_device(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _sample(self, batch: StepBatch, hidden: Tensor, output: ModelRunnerOutput) -> None:
        indices = batch.sampled_rows()
        if not indices:
            return
        last = torch.from_numpy(batch.attention.query_start_loc[1:][indices] - 1)
        logits = self._decoder.logits(hidden[last.to(self._device)])
        output.num_logit_rows += len(indices)
        rows = [batch.rows[i] for i in indices]
        results = self._sampler.sample(logits, [row.sampling for row in rows])
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, SampledToken):
                row.append_token(result.token_id)
                output.sampled[row.request_id] = result
            else:
                output.errors[row.request_id] = result.message
                self._backend.scrub(row.block_ids[: row.num_blocks])

    def _collect_prompt_logprobs(
        self, batch: StepBatch, hidden: Tensor, output: ModelRunnerOutput
    ) -> None:
        starts = batch.attention.query_start_loc.tolist()
        for i, row in enumerate(batch.rows):
            if row.params.prompt_logprobs is None:
                continue
            known = len(row.prompt_logprobs)
            self._extend_prompt_logprobs(row, hidden[starts[i] : starts[i + 1]])
            output.num_logit_rows += len(row.prompt_logprobs) - known
            if batch.ends[i] == row.num_prompt_tokens:  # complete: report it once
                output.prompt_logprobs[row.request_id] = row.prompt_logprobs

    def _extend_prompt_logprobs(self, row: BatchRow, hidden: Tensor) -> None:
        first = row.num_computed_tokens
        if first == 0:
            row.prompt_logprobs = [None]
        # The hidden state of token i predicts token i + 1 of the prompt.
        count = max(0, min(len(hidden), row.num_prompt_tokens - 1 - first))
        targets = row.token_ids[first + 1 : first + 1 + count].tolist()
        num_top = row.params.prompt_logprobs
        assert num_top is not None
        for begin in range(0, count, _LOGIT_ROWS):
            end = min(begin + _LOGIT_ROWS, count)
            logits = self._decoder.logits(hidden[begin:end])
            row.prompt_logprobs.extend(prompt_logprobs(logits, targets[begin:end], num_top))


def build_backend(loaded: LoadedModel) -> AttentionBackend:
    """Return the attention backend with its KV pool, sized by the resolved config."""
    config = loaded.config
    assert config.num_blocks is not None and config.block_size is not None
    return TorchAttention(
        loaded.model_config,
        config.num_blocks,
        config.block_size,
        loaded.dtype,
        loaded.device,
        share=config.attention == "forest",
    )
