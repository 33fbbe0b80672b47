"""From new token ids to RequestOutput: text, stop strings, log-probabilities.

Owns what the caller sees of each request. A stop string found here ends the request
in the same step, through the ids returned by `process`.
"""

from dataclasses import dataclass, field

from tiny_vllm.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from tiny_vllm.protocol import EngineCoreOutput
from tiny_vllm.request import Request, RequestId
from tiny_vllm.tokenizer import StreamingDetokenizer, Tokenizer


@dataclass(slots=True)
class StopHit:
    """A request that a stop string ended."""

    request_id: RequestId
    stop: str


@dataclass(slots=True)
class _State:
    request: Request
    prompt: str | None
    prompt_token_ids: list[int]  # shared by all outputs of the request
    detokenizer: StreamingDetokenizer | None
    completion: CompletionOutput = field(default_factory=lambda: CompletionOutput(index=0))
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


class OutputProcessor:
    """Keeps one state a request until it is finished."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[RequestId, _State] = {}

    def add(self, request: Request, prompt: str | None) -> None:
        """Start following a request."""
        params, prompt_token_ids = request.params, list(request.prompt_token_ids)
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
        self._states[request.request_id] = _State(request, prompt, prompt_token_ids, detokenizer)

    def process(self, outputs: list[EngineCoreOutput]) -> tuple[list[RequestOutput], list[StopHit]]:
        """Digest a step's outputs.

        Returns:
            (what changed, requests to finish now because of a stop string).
        """
        results, stops = [], []
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:  # finished earlier: nothing is emitted after that
                continue
            hit = self._digest(state, output)
            if hit is not None and output.finish_reason is not FinishReason.STOP:
                stops.append(hit)
            results.append(self._snapshot(state, output))
            if state.completion.finished:
                del self._states[output.request_id]
        return results, stops

    def _digest(self, state: _State, output: EngineCoreOutput) -> StopHit | None:
        completion = state.completion
        state.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens)
        completion.token_ids.extend(output.new_token_ids)
        self._add_logprobs(completion, output)
        if output.prompt_logprobs is not None:
            state.prompt_logprobs = [self._with_text(p) for p in output.prompt_logprobs]
        completion.finish_reason = output.finish_reason
        completion.stop_reason = output.stop_reason
        detokenizer = state.detokenizer
        if detokenizer is None:
            return None
        shown = output.new_token_ids
        ended_by_token = output.finish_reason is FinishReason.STOP
        if ended_by_token and state.request.params.skip_special_tokens and shown:
            shown = shown[:-1]  # the token that ended the output is no part of the text
        match = detokenizer.append(shown)
        if match is None and completion.finished:
            detokenizer.finish()
        completion.text += detokenizer.take()
        if match is None:
            return None
        completion.finish_reason = FinishReason.STOP
        completion.stop_reason = match.stop
        return StopHit(output.request_id, match.stop)

    def _add_logprobs(self, completion: CompletionOutput, output: EngineCoreOutput) -> None:
        if output.logprobs is None:
            return
        completion.logprobs = completion.logprobs or []
        total = completion.cumulative_logprob or 0.0
        for token_id, entry in zip(output.new_token_ids, output.logprobs, strict=True):
            completion.logprobs.append(self._with_text(entry) or {})
            total += entry[token_id].logprob
        completion.cumulative_logprob = total

    def _with_text(self, entry: TokenLogprobs | None) -> TokenLogprobs | None:
        if entry is None or self._tokenizer is None:
            return entry
        return {
            token_id: Logprob(p.logprob, p.rank, self._tokenizer.token_text(token_id))
            for token_id, p in entry.items()
        }

    def _snapshot(self, state: _State, output: EngineCoreOutput) -> RequestOutput:
        done = state.completion
        return RequestOutput(
            request_id=state.request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=[
                CompletionOutput(
                    index=0,
                    text=done.text,
                    token_ids=list(done.token_ids),
                    logprobs=None if done.logprobs is None else list(done.logprobs),
                    cumulative_logprob=done.cumulative_logprob,
                    finish_reason=done.finish_reason,
                    stop_reason=done.stop_reason,
                )
            ],
            finished=done.finished,
            num_cached_tokens=state.num_cached_tokens,
            prompt_logprobs=state.prompt_logprobs,
            metrics=state.request.metrics,
            error=output.error,
        )
