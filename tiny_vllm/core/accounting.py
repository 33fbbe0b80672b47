"""Keeps the token ledger: which positions ran for the first time, which again.

Owns one high-water mark per preempted request. Knows nothing of blocks or queues.

    position   [ recomputed .... | computed (prompt) ... | decoded (output) ... ]
                start            ^mark                   ^num_prompt_tokens   end
"""

from collections.abc import Sequence

from tiny_vllm.cache_report import CacheReport
from tiny_vllm.core.kv_cache_manager import PrefixHit
from tiny_vllm.protocol import TokenLedger
from tiny_vllm.request import Request, RequestId


class Accountant:
    """Writes the `TokenLedger`; its equations hold after every call."""

    def __init__(self) -> None:
        self.ledger = TokenLedger()
        self._marks: dict[RequestId, int] = {}

    def held(self, request: Request) -> None:
        """Count a step that a request waited for another one to compute its prefix."""
        self.ledger.held_requests += not request.num_held_steps
        self.ledger.held_steps += 1
        request.num_held_steps += 1

    def admitted(self, request: Request, hit: PrefixHit, report: CacheReport) -> None:
        """Count a request's first admission and its look-up; sets its cached tokens."""
        request.cache_report = report
        ledger = self.ledger
        request.num_cached_tokens = hit.num_tokens
        ledger.prompt_tokens += request.num_prompt_tokens
        ledger.cached_tokens += hit.num_tokens
        ledger.copied_tokens += hit.num_copied_tokens
        ledger.pending_tokens += request.num_prompt_tokens - hit.num_tokens
        ledger.blocks_asked += hit.num_asked
        ledger.blocks_found += len(hit.blocks)
        ledger.add_misses(report)

    def resumed(self, request: Request, hit: PrefixHit) -> None:
        """Count an admission after preemption apart.

        Prompt tokens found now that the request had never reached are ordinary cached
        tokens: nothing was computed for them, neither then nor again.
        """
        ledger = self.ledger
        mark = self._marks[request.request_id]
        first = max(0, min(hit.num_tokens, request.num_prompt_tokens) - mark)
        request.num_cached_tokens += first
        ledger.cached_tokens += first
        ledger.cached_tokens_late += first
        ledger.pending_tokens -= first
        ledger.cached_tokens_resumed += hit.num_tokens - first
        ledger.blocks_asked_resumed += hit.num_asked
        ledger.blocks_found_resumed += len(hit.blocks)

    def ran(self, request: Request, num_tokens: int) -> None:
        """Count tokens run through the model, before ``num_computed_tokens`` moves on."""
        ledger = self.ledger
        start = request.num_computed_tokens
        num_prompt = len(request.prompt_token_ids)
        ledger.forward_tokens += num_tokens
        if start >= num_prompt and not request.num_preemptions:
            ledger.decoded_tokens += num_tokens
            return
        end = start + num_tokens
        again = max(0, min(end, self._marks.get(request.request_id, 0)) - start)
        prompt = max(0, min(end, num_prompt) - start - again)
        ledger.recomputed_tokens += again
        ledger.computed_tokens += prompt
        ledger.pending_tokens -= prompt
        ledger.decoded_tokens += num_tokens - again - prompt

    def decoded(self, requests: Sequence[Request]) -> None:
        """`ran` with one token for requests past their prompts; at once while none is resumed."""
        if self._marks:
            for request in requests:
                self.ran(request, 1)
        else:
            self.ledger.forward_tokens += len(requests)
            self.ledger.decoded_tokens += len(requests)

    def preempted(self, request: Request) -> None:
        """Remember how far the request had come."""
        self.ledger.num_preemptions += 1
        self._marks[request.request_id] = self._reached(request)

    def closed(self, request: Request) -> None:
        """Settle an admitted request that ends: prompt tokens it never reached are dropped."""
        dropped = max(0, request.num_prompt_tokens - self._reached(request))
        self.ledger.dropped_tokens += dropped
        self.ledger.pending_tokens -= dropped
        self._marks.pop(request.request_id, None)

    def _reached(self, request: Request) -> int:
        return max(self._marks.get(request.request_id, 0), request.num_computed_tokens)
