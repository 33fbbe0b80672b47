"""One step being built: the token budget that is left and the messages so far.

Lives for one scheduling round. Invariant: ``budget`` plus the scheduled tokens is the
step's token budget; the order of `add_*` calls is the order of the batch.
"""

from tiny_vllm.protocol import CachedRequestData, NewRequestData, SchedulerOutput
from tiny_vllm.request import BlockId, Request, RequestId


class StepPlan:
    """Collects the rows of one step into a `SchedulerOutput`."""

    def __init__(self, step: int, budget: int, removed: list[RequestId]) -> None:
        self.budget = budget
        self.num_cached_tokens = 0
        self.requests: dict[RequestId, Request] = {}
        self.output = SchedulerOutput(step=step, removed_request_ids=removed)

    def add_decode(self, request: Request, new_block_ids: list[BlockId]) -> None:
        """A running request feeds back its newest token."""
        request_id, output = request.request_id, self.output
        output.cached_requests.append(
            CachedRequestData(request_id, new_block_ids, request.num_computed_tokens)
        )
        output.num_scheduled_tokens[request_id] = 1
        output.num_decode_tokens += 1
        self.requests[request_id] = request
        self.budget -= 1

    def add_prefill(self, request: Request, new_block_ids: list[BlockId], num_tokens: int) -> None:
        """A running request goes on with its prompt (or its recomputation)."""
        self.output.cached_requests.append(
            CachedRequestData(request.request_id, new_block_ids, request.num_computed_tokens)
        )
        self._add_prefill_tokens(request, num_tokens)

    def add_new(self, request: Request, num_tokens: int) -> None:
        """A request the runner does not hold: new, or resumed after preemption."""
        data = NewRequestData(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
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
        self.budget -= num_tokens
