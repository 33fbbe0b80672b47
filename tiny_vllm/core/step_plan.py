"""One step being built: the token budget that is left and the messages so far.

Lives for one scheduling round. Invariant: ``budget`` plus the scheduled tokens is the
step's token budget; the order of `add_*` calls is the order of the batch, decodes first.
"""

from tiny_vllm.protocol import BlockCopy, CachedRequestData, NewRequestData, SchedulerOutput
from tiny_vllm.request import BlockId, Request, RequestId


class StepPlan:
    """Collects the rows of one step into a `SchedulerOutput`."""

    def __init__(self, step: int, budget: int, removed: list[RequestId]) -> None:
        self.budget = budget
        self.num_cached_tokens = 0
        self.requests: dict[RequestId, Request] = {}
        self.unfinished_prefills: list[Request] = []  # that go on in a later step
        self.output = SchedulerOutput(step=step, removed_request_ids=removed)

    def add_decodes(
        self, requests: dict[RequestId, Request], messages: list[CachedRequestData]
    ) -> None:
        """Running requests that feed back their newest token, all at once: the hot path."""
        self.requests.update(requests)
        self.output.cached_requests += messages
        self.output.num_scheduled_tokens.update(dict.fromkeys(requests, 1))
        self.output.num_decode_tokens += len(requests)
        self.budget -= len(requests)

    def add_prefill(self, request: Request, new_block_ids: list[BlockId], num_tokens: int) -> None:
        """A running request goes on with its prompt (or its recomputation)."""
        self.output.cached_requests.append(
            CachedRequestData(request.request_id, new_block_ids, request.num_computed_tokens)
        )
        self._add_prefill_tokens(request, num_tokens)

    def add_new(self, request: Request, num_tokens: int, copy: BlockCopy | None = None) -> None:
        """A request the runner does not hold: new, or resumed after preemption.

        Args:
            copy: what goes into the block of its first scheduled token before the step.
        """
        if copy is not None:
            self.output.block_copies.append(copy)
        data = NewRequestData(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            params=request.params,
            block_ids=list(request.block_ids),
            num_computed_tokens=request.num_computed_tokens,
            eos_token_ids=request.eos_token_ids,
        )
        self.output.new_requests.append(data)
        self._add_prefill_tokens(request, num_tokens)

    def _add_prefill_tokens(self, request: Request, num_tokens: int) -> None:
        self.output.num_scheduled_tokens[request.request_id] = num_tokens
        self.output.num_prefill_tokens += num_tokens
        self.requests[request.request_id] = request
        if request.num_computed_tokens + num_tokens < request.num_tokens:
            self.unfinished_prefills.append(request)
        self.budget -= num_tokens
