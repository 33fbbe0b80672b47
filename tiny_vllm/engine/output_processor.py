"""From new token ids to RequestOutput: text, stop strings, log-probabilities.

Owns what the caller sees of each request. A stop string found here ends the request
in the same step, through the ids returned by `process`.
"""

from dataclasses import dataclass, field

from tiny_vllm.cache_report import CacheReport
from tiny_vllm.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from tiny_vllm.protocol import EngineCoreOutput
from tiny_vllm.request import Request, RequestId
from tiny_vllm.tokenizer import StreamingDetokenizer, Tokenizer


@dataclass(slots=True)
class StopHit:
    """A request that a stop string ended."""

    request_id: RequestId
    stop: str


@dataclass(slots=True)
class _Growing:
    """What a request has produced so far; every list only grows."""

    detokenizer: StreamingDetokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprobs: list[float] = field(default_factory=list)
    text_length: int = 0

    def snapshot(self, num_tokens: int, text_length: int) -> CompletionOutput:
        """The completion as it was at these lengths, in lists of its own."""
        sums = self.cumulative_logprobs[:num_tokens]
        return CompletionOutput(
            index=0,
            text=self.detokenizer.text[:text_length] if self.detokenizer else "",
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens] or None,
            cumulative_logprob=sums[-1] if sums else None,
        )


@dataclass(slots=True)
class _State:
    request_id: RequestId
    prompt: str | None
    prompt_token_ids: list[int]  # shared by all outputs of the request
    skip_special_tokens: bool
    metrics: RequestMetrics
    growing: _Growing
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    cache_report: CacheReport | None = None


class OutputProcessor:
    """Keeps one state a request until it is finished."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[RequestId, _State] = {}

    def add(self, request: Request, prompt: str | None) -> None:
        """Start following a request."""
        params, known = request.params, request.prompt_token_ids
        prompt_token_ids = known if isinstance(known, list) else list(known)
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = StreamingDetokenizer(
                self._tokenizer,
                prompt_token_ids,
                params.stop_strings,
                params.include_stop_str_in_output,
                params.skip_special_tokens,
                params.min_tokens,
            )
        self._states[request.request_id] = _State(
            request.request_id,
            prompt,
            prompt_token_ids,
            params.skip_special_tokens,
            request.metrics,
            _Growing(detokenizer),
        )

    def process(self, outputs: list[EngineCoreOutput]) -> tuple[list[RequestOutput], list[StopHit]]:
        """Digest a step's outputs.

        Returns:
            (what changed, requests to finish now because of a stop string).
        """
        results, stops, states = [], [], self._states
        for output in outputs:
            state = states.get(output.request_id)
            if state is None:  # finished earlier: nothing is emitted after that
                continue
            hit = self._digest(state, output)
            if hit is not None and output.finish_reason is not FinishReason.STOP:
                stops.append(hit)
            if hit is not None or output.finish_reason is not None:
                del states[output.request_id]
                results.append(_last_output(state, output, hit))
            else:
                results.append(_output(state))
        return results, stops

    def _digest(self, state: _State, output: EngineCoreOutput) -> StopHit | None:
        growing = state.growing
        growing.token_ids.extend(output.new_token_ids)
        if output.num_cached_tokens > state.num_cached_tokens:
            state.num_cached_tokens = output.num_cached_tokens
        if state.cache_report is None:
            state.cache_report = self._readable(output.cache_report)
        if output.logprobs is not None:
            self._add_logprobs(growing, output.new_token_ids, output.logprobs)
        if output.prompt_logprobs is not None:
            state.prompt_logprobs = [self._with_text(p) for p in output.prompt_logprobs]
        if growing.detokenizer is None:
            return None
        return self._add_text(state, growing.detokenizer, output)

    def _add_text(
        self, state: _State, detokenizer: StreamingDetokenizer, output: EngineCoreOutput
    ) -> StopHit | None:
        shown = output.new_token_ids
        ended_by_token = output.finish_reason is FinishReason.STOP
        if ended_by_token and state.skip_special_tokens and shown:
            shown = shown[:-1]  # the token that ended the output is no part of the text
        match = detokenizer.append(shown)
        if match is None and output.finish_reason is not None:
            detokenizer.finish()
        state.growing.text_length += len(detokenizer.take())
        return None if match is None else StopHit(state.request_id, match.stop)

    def _add_logprobs(
        self, growing: _Growing, token_ids: list[int], logprobs: list[TokenLogprobs]
    ) -> None:
        total = growing.cumulative_logprobs[-1] if growing.cumulative_logprobs else 0.0
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            growing.logprobs.append(self._with_text(entry) or {})
            total += entry[token_id].logprob
            growing.cumulative_logprobs.append(total)

    def _readable(self, report: CacheReport | None) -> CacheReport | None:
        if report is None or self._tokenizer is None:
            return report
        return report.with_text(self._tokenizer.token_text)

    def _with_text(self, entry: TokenLogprobs | None) -> TokenLogprobs | None:
        if entry is None or self._tokenizer is None:
            return entry
        return {
            token_id: Logprob(p.logprob, p.rank, self._tokenizer.token_text(token_id))
            for token_id, p in entry.items()
        }


def _output(state: _State) -> RequestOutput:
    """What the caller sees after a step that did not end the request. Positional: the hot path."""
    growing = state.growing
    return RequestOutput.deferred(
        state.request_id,
        state.prompt,
        state.prompt_token_ids,
        growing,
        len(growing.token_ids),
        growing.text_length,
        state.num_cached_tokens,
        state.prompt_logprobs,
        state.metrics,
        state.cache_report,
    )


def _last_output(state: _State, output: EngineCoreOutput, hit: StopHit | None) -> RequestOutput:
    """The finished request, with nothing left to build."""
    growing = state.growing
    completion = growing.snapshot(len(growing.token_ids), growing.text_length)
    completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
    if hit is not None:
        completion.finish_reason, completion.stop_reason = FinishReason.STOP, hit.stop
    return RequestOutput(
        request_id=state.request_id,
        prompt=state.prompt,
        prompt_token_ids=state.prompt_token_ids,
        outputs=[completion],
        finished=True,
        num_cached_tokens=state.num_cached_tokens,
        prompt_logprobs=state.prompt_logprobs,
        metrics=state.metrics,
        cache_report=state.cache_report,
        error=output.error,
    )
