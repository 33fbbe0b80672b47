"""Which requests are refused at once: those that could never finish on this engine.

Every message names the request's number, the limit and the way out.
"""

from tiny_vllm.errors import InvalidRequestError, RequestTooLongError
from tiny_vllm.request import Request


def check_can_ever_run(
    request: Request, max_model_len: int, num_blocks: int, block_size: int
) -> None:
    """Refuse a request that can never fit.

    An explicit ``params.max_tokens`` must fit the pool together with the prompt; without
    one the output may run until the pool is full.

    Raises:
        RequestTooLongError: names the tokens needed and the tokens there are.
        InvalidRequestError: an empty prompt.
    """
    prompt, capacity = request.num_prompt_tokens, num_blocks * block_size
    if prompt == 0:
        raise InvalidRequestError("the prompt has no tokens; give at least 1", "prompt_token_ids")
    if prompt + 1 > max_model_len:
        raise RequestTooLongError(
            f"the prompt has {prompt} tokens, but max_model_len={max_model_len} must hold it and "
            "one output token; shorten the prompt or raise max_model_len",
            "prompt_token_ids",
        )
    capped = request.params.max_tokens is not None
    need = prompt + (request.max_tokens if capped else 1)
    if need > capacity:
        raise RequestTooLongError(
            f"prompt ({prompt}) + output ({need - prompt}) = {need} tokens, but the KV cache holds "
            f"{capacity} (num_blocks={num_blocks} x block_size={block_size}); lower max_tokens, "
            "shorten the prompt or raise num_blocks",
            "max_tokens" if capped and prompt < capacity else "prompt_token_ids",
        )
