"""A request of the baseline: what it may still produce, what it has produced, and its end.

`OriginRequest` is the live state, `snapshot` what a caller may keep. `RequestFactory` checks
what is asked for. Knows nothing of slots or of the model's tensors.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.origin.text import TextFactory, TextStream
from tiny_vllm.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from tiny_vllm.protocol import EngineInfo, SampledToken
from tiny_vllm.sampler import SamplingRow, make_generator, request_seed
from tiny_vllm.sampling_params import SamplingParams
from tiny_vllm.validation import validate_request


@dataclass(slots=True, eq=False)
class OriginRequest:
    """State of one request.

    Attributes:
        row: what the sampler reads; its output is the live list of ``completion``.
        max_tokens: resolved, so that prompt + max_tokens fit a slot.
    """

    request_id: str
    prompt_token_ids: list[int]
    row: SamplingRow
    max_tokens: int
    completion: CompletionOutput
    text: TextStream
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.row.output_token_ids)

    @property
    def finished(self) -> bool:
        return self.completion.finished

    def append(self, sampled: SampledToken, now: float) -> None:
        """Take a sampled token at time ``now`` and finish if it was the last one."""
        self.completion.token_ids.append(sampled.token_id)
        self.metrics.token_times.append(now)
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        self._add_logprobs(sampled)
        reason, stop_reason = self._ending(sampled.token_id)
        stop_string = None
        # A token that ends the output is no part of the text, unless special ones are.
        if reason is not FinishReason.STOP or not self.row.params.skip_special_tokens:
            stop_string = self.text.append(sampled.token_id)
        self.completion.text += self.text.take()
        if stop_string is not None:
            self.finish(FinishReason.STOP, now, stop_string)
        elif reason is not None:
            self.finish(reason, now, stop_reason)

    def _add_logprobs(self, sampled: SampledToken) -> None:
        if sampled.logprobs is None:
            return
        completion = self.completion
        completion.logprobs = completion.logprobs or []
        completion.logprobs.append(self.text.name_tokens(sampled.logprobs))
        total = completion.cumulative_logprob or 0.0
        completion.cumulative_logprob = total + sampled.logprobs[sampled.token_id].logprob

    def add_prompt_logprobs(self, entries: Sequence[TokenLogprobs | None] | None) -> None:
        """Take the log-probabilities of the whole prompt, None when not asked for."""
        if entries is not None:
            name = self.text.name_tokens
            self.prompt_logprobs = [entry and name(entry) for entry in entries]

    def _ending(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        # While min_tokens lasts the sampler masks the tokens that would end the request.
        params = self.row.params
        if token_id in self.row.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
        is_full = len(self.row.output_token_ids) >= self.max_tokens
        return (FinishReason.LENGTH if is_full else None), None

    def finish(
        self,
        reason: FinishReason,
        now: float,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """End the request; ``error`` explains FinishReason.ERROR."""
        self.text.finish()
        self.completion.text += self.text.take()
        self.completion.finish_reason, self.completion.stop_reason = reason, stop_reason
        self.metrics.finished_time = now
        self.error = error

    def snapshot(self) -> RequestOutput:
        """The state so far; later tokens do not change its completion.

        The prompt's list is shared between snapshots: it may be long, and nobody changes it.
        """
        done = self.completion
        completion = CompletionOutput(
            index=0,
            text=done.text,
            token_ids=list(done.token_ids),
            logprobs=None if done.logprobs is None else list(done.logprobs),
            cumulative_logprob=done.cumulative_logprob,
            finish_reason=done.finish_reason,
            stop_reason=done.stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=None,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=done.finished,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class RequestFactory:
    """Checks what a caller asks for and makes a request of it."""

    info: EngineInfo
    eos_token_ids: frozenset[int]
    seed: int
    texts: TextFactory

    def make(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> OriginRequest:
        """Raises InvalidRequestError: a value that cannot work."""
        if params.n != 1:
            raise InvalidRequestError(
                f"n={params.n} must be 1 here; add one request for each completion", "n"
            )
        info = self.info
        max_tokens = validate_request(prompt_token_ids, params, info.vocab_size, info.max_model_len)
        text = self.texts.make(prompt_token_ids, params)
        completion = CompletionOutput(index=0)
        prompt = list(prompt_token_ids)
        row = SamplingRow(params, prompt, completion.token_ids, self.eos_token_ids)
        if not params.is_greedy:
            row.generator = make_generator(request_seed(params, self.seed, request_id))
        metrics = RequestMetrics(arrival_time=time.perf_counter())
        return OriginRequest(request_id, prompt, row, max_tokens, completion, text, metrics)
