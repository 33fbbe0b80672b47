"""Holds a request back while another one computes what it needs, so that it is computed once.

Keeps nothing about leaders: whether one is at work is read off the step being planned, so
a request is free again as soon as its leader is aborted, fails or is preempted. Each
request waits a bounded number of steps.
"""

from tiny_vllm.core.kv_cache_manager import KVCacheManager, PrefixHit
from tiny_vllm.core.step_plan import StepPlan
from tiny_vllm.request import Request

# A part of a block is worth a step's wait when so many tokens may be saved by it, all
# waiting requests taken together.
MIN_SAVED_TOKENS = 512


class HoldBack:
    """Decides who waits.

    Args:
        max_steps: steps a request is held at most; 0 holds nobody.
    """

    def __init__(self, kv: KVCacheManager, max_steps: int) -> None:
        self._kv, self._max_steps = kv, max_steps

    def waits(self, request: Request, hit: PrefixHit, plan: StepPlan, num_waiting: int) -> bool:
        """True when ``request`` should not start in this step."""
        if request.num_held_steps >= self._max_steps or not request.use_prefix_cache:
            return False
        return self._block_is_coming(request, hit, plan) or self._part_is_coming(
            request, hit, num_waiting
        )

    def _block_is_coming(self, request: Request, hit: PrefixHit, plan: StepPlan) -> bool:
        """A running prefill will reach the request's next block in a later step."""
        index = len(hit.blocks)
        if index >= hit.num_asked or not plan.unfinished_prefills:
            return False
        wanted = request.block_hashes[index]
        return any(
            index < len(leader.block_hashes) and leader.block_hashes[index] == wanted
            for leader in plan.unfinished_prefills
        )

    def _part_is_coming(self, request: Request, hit: PrefixHit, num_waiting: int) -> bool:
        """This step computes a block that can be copied from in the next one."""
        if (self._kv.block_size - 1) * num_waiting < MIN_SAVED_TOKENS:
            return False
        if not self._kv.cache.partial_reuse:
            return False
        _, common = self._kv.cache.nearest(request, hit.blocks)
        return (common - hit.num_copied_tokens) * num_waiting >= MIN_SAVED_TOKENS
