"""When does a request end? Pure checks on ids and lengths; stop strings are the front end's."""

from typing import NamedTuple

from tiny_vllm.outputs import FinishReason
from tiny_vllm.request import Request

KV_CACHE_FULL = "kv_cache_full"


class Stop(NamedTuple):
    """Why a request ended; ``stop_reason`` is the stop id, or KV_CACHE_FULL."""

    reason: FinishReason
    stop_reason: int | str | None = None


def prepare_stops(request: Request, max_model_len: int, capacity: int) -> None:
    """Note on the request when `check_stop` is worth asking: at a length, and at certain ids."""
    params = request.params
    output_end = request.num_prompt_tokens + request.max_tokens
    request.length_limit = min(output_end, max_model_len, capacity + 1)
    eos = frozenset() if params.ignore_eos else request.eos_token_ids
    request.end_ids = eos.union(params.stop_token_ids)


def check_stop(request: Request, max_model_len: int, capacity: int) -> Stop | None:
    """Decide after a token was appended; None to go on.

    A request that would need more than ``capacity`` tokens of KV, the whole pool, ends
    with ``length`` and the stop reason KV_CACHE_FULL (its prompt set no smaller limit).
    """
    token_ids, params = request.token_ids, request.params  # read once: the hot path
    num_tokens = len(token_ids)
    num_output = num_tokens - len(request.prompt_token_ids)
    if num_output >= params.min_tokens:
        token_id = token_ids[-1]
        if token_id in request.eos_token_ids and not params.ignore_eos:
            return Stop(FinishReason.STOP)
        if token_id in params.stop_token_ids:
            return Stop(FinishReason.STOP, token_id)
    if num_output >= request.max_tokens or num_tokens >= max_model_len:
        return Stop(FinishReason.LENGTH)
    if num_tokens > capacity:
        return Stop(FinishReason.LENGTH, KV_CACHE_FULL)
    return None
