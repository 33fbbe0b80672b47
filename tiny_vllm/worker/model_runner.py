"""Runs one step: messages in, sampled tokens out.

Owns the model, the KV tensors (through the attention backend) and the sampler. It
knows nothing of scheduling or caching policy: blocks and counts arrive decided.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tiny_vllm.attention.metadata import AttentionBackend, IntArray
from tiny_vllm.attention.torch_backend import TorchAttention
from tiny_vllm.models.loader import LoadedModel
from tiny_vllm.ops.memory import to_device
from tiny_vllm.protocol import ModelRunnerOutput, SampledToken, SchedulerOutput
from tiny_vllm.request import RequestId
from tiny_vllm.sampler import SampleError, Sampler, prompt_logprobs
from tiny_vllm.worker.input_batch import BatchRow, InputBatch, StepBatch

if TYPE_CHECKING:  # imports triton
    from tiny_vllm.worker.decode_loop import DecodeLoop, Ticket

_LOGIT_ROWS = 128  # prompt log-probabilities: rows of logits held at a time


class ModelRunner:
    """The data plane of one device.

    Args:
        decode_loop: runs steps in which every row decodes one token; None where the backend
            keeps no state on the device.
        run_ahead: launch the next decode step before the results of this one are read.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        backend: AttentionBackend,
        decode_loop: "DecodeLoop | None" = None,
        run_ahead: bool = False,
    ) -> None:
        self._decoder = loaded.decoder
        self._device = loaded.device
        self._backend = backend
        self._batch = InputBatch(loaded.config.seed, loaded.device)
        self._sampler = Sampler()
        self._loop, self._run_ahead = decode_loop, run_ahead
        self._block_size = loaded.config.block_size or 1
        self._ahead: Ticket | None = None  # of the step after the last one returned

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run the scheduled tokens through the model and sample where a row is complete."""
        rows, grew = self._batch.update(scheduler_output)
        if not rows:
            return ModelRunnerOutput()
        if scheduler_output.block_copies:
            self._backend.copy_blocks(scheduler_output.block_copies)
        counts = list(scheduler_output.num_scheduled_tokens.values())
        if self._loop is not None:
            is_decode = all(r.num_tokens == r.num_computed_tokens + 1 for r in rows)
            if is_decode and not reads_what_is_written(
                rows, {new.request_id for new in scheduler_output.new_requests}, self._block_size
            ):
                return self._decode(self._loop, rows, grew)
            self._loop.forget()
            self._ahead = None
        return self._run(StepBatch(rows, counts))

    def _run(self, batch: StepBatch) -> ModelRunnerOutput:
        attend, kv_bytes = self._backend.plan(batch.attention)
        input_ids = self._to_device(batch.input_ids())
        if callable(attend):
            positions = self._to_device(batch.attention.positions())
            hidden = self._decoder.forward(input_ids, positions, attend)
        else:
            hidden = self._decoder.forward_fused(input_ids, attend.positions, attend)
        output = ModelRunnerOutput(
            num_forward_tokens=batch.attention.num_tokens,
            kv_bytes=kv_bytes,
            attention_context_tokens=int((batch.attention.positions() + 1).sum()),
        )
        self._collect_prompt_logprobs(batch, hidden, output)
        self._sample(batch, hidden, output)
        return output

    def _decode(self, loop: "DecodeLoop", rows: list[BatchRow], grew: bool) -> ModelRunnerOutput:
        """A step of the decode loop; launched earlier if the last step ran ahead."""
        ticket, self._ahead = self._ahead, None
        if not loop.holds(rows):
            loop.load(rows)
            ticket = None
        elif grew:
            loop.add_blocks()
        ticket = ticket or loop.launch()
        is_plain = all(row.is_plain for row in rows)
        if is_plain and self._run_ahead and loop.can_run_ahead():
            self._ahead = loop.launch()
        output = ModelRunnerOutput(
            num_forward_tokens=len(rows),
            num_logit_rows=len(rows),
            kv_bytes=ticket.kv_bytes,
            attention_context_tokens=ticket.context_tokens,
        )
        if is_plain:
            results = self._sampler.results(*ticket.wait())
        else:
            results = self._sampler.sample(ticket.logits, [row.sampling for row in rows])
            loop.tokens_were_sampled()
        self._book(rows, results, output)
        return output

    def _to_device(self, values: IntArray) -> Tensor:
        return to_device(values, self._device)

    def _sample(self, batch: StepBatch, hidden: Tensor, output: ModelRunnerOutput) -> None:
        indices = batch.sampled_rows()
        if not indices:
            return
        last = self._to_device(batch.attention.query_start_loc[1:][indices] - 1)
        logits = self._decoder.logits(hidden[last])
        output.num_logit_rows += len(indices)
        rows = [batch.rows[i] for i in indices]
        if self._loop is not None and all(row.is_plain_greedy for row in rows):
            results = self._sampler.results(*self._loop.pick(logits))
        else:
            results = self._sampler.sample(logits, [row.sampling for row in rows])
        self._book(rows, results, output)

    def _book(
        self,
        rows: list[BatchRow],
        results: list[SampledToken | SampleError],
        output: ModelRunnerOutput,
    ) -> None:
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
        targets = row.token_ids(first + 1, first + 1 + count)
        num_top = row.params.prompt_logprobs
        assert num_top is not None
        for begin in range(0, count, _LOGIT_ROWS):
            end = min(begin + _LOGIT_ROWS, count)
            logits = self._decoder.logits(hidden[begin:end])
            row.prompt_logprobs.extend(prompt_logprobs(logits, targets[begin:end], num_top))


def reads_what_is_written(rows: list[BatchRow], new_ids: set[RequestId], block_size: int) -> bool:
    """True when a row that is new in this step reads a block that another one fills in it.

    The decode loop may store a row's newest key while it attends, so others must not read
    it in that step. Only a new row can: a block that somebody shares is full.
    """
    if not new_ids:
        return False
    written = {int(row.block_ids[row.num_computed_tokens // block_size]) for row in rows}
    return any(
        not written.isdisjoint(row.block_ids[: row.num_computed_tokens // block_size].tolist())
        for row in rows
        if row.request_id in new_ids
    )


def build_runner(loaded: LoadedModel) -> ModelRunner:
    """Return the runner with its KV pool, sized by the resolved config."""
    config = loaded.config
    assert config.num_blocks is not None and config.block_size is not None
    shape = (loaded.model_config, config.num_blocks, config.block_size)
    share = config.attention == "forest"
    if config.attention_backend == "torch":
        return ModelRunner(loaded, TorchAttention(*shape, loaded.dtype, loaded.device, share=share))
    from tiny_vllm.attention.triton_backend import TritonAttention
    from tiny_vllm.worker.decode_loop import DecodeLoop

    assert config.max_num_seqs is not None and config.max_model_len is not None
    assert config.max_num_batched_tokens is not None
    backend = TritonAttention(
        *shape, loaded.dtype, loaded.device, share=share, max_tokens=config.max_num_batched_tokens
    )
    max_blocks = -(-config.max_model_len // config.block_size) + 1
    with torch.inference_mode():
        loop = DecodeLoop(
            loaded.decoder, backend, config.max_num_seqs, max_blocks, config.max_model_len,
            config.use_cuda_graph,
        )  # fmt: skip
        backend.warm_up(loaded.decoder.forward_fused, config.max_num_batched_tokens)
        loop.capture_all()
    return ModelRunner(loaded, backend, loop, config.async_scheduling)
