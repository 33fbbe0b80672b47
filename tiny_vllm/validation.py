"""Checks of a request that need the model's bounds, shared by every engine.

`validate_request` runs before a request is queued; what passes it cannot index outside the
vocabulary and has room for at least one output token. Stdlib only.
"""

import operator
from collections.abc import Iterable, Sequence

from tiny_vllm.errors import InvalidRequestError, RequestTooLongError
from tiny_vllm.sampling_params import SamplingParams


def validate_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    highest: int | None = None,
) -> int:
    """Return the number of output tokens the request may have: at least 1.

    ``max_tokens`` of None, or one beyond the context limit, becomes what is left of
    ``max_model_len`` after the prompt.

    Args:
        highest: the highest id of a prompt without negative ones, if it is known.

    Raises:
        InvalidRequestError: an empty prompt or an id outside the vocabulary; ``field`` says where.
        RequestTooLongError: the prompt leaves no room for an output token.
    """
    _check_prompt(prompt_token_ids, vocab_size, highest)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    room = max_model_len - len(prompt_token_ids)
    if room < 1:
        raise RequestTooLongError(
            f"the prompt has {len(prompt_token_ids)} tokens and max_model_len={max_model_len} "
            f"must also hold one output token; shorten the prompt to {max_model_len - 1} tokens "
            f"or raise max_model_len",
            "prompt",
        )
    return room if params.max_tokens is None else min(params.max_tokens, room)


def validate_prompt(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequestError for an empty prompt, or ids that are not the model's."""
    _check_prompt(token_ids, vocab_size, None)


def validate_cache_key(name: str, value: object) -> None:
    """Raise InvalidRequestError unless the value is text or None: another type has no one key."""
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be text or None, got {value!r:.80}", name)


def _check_prompt(token_ids: Sequence[int], vocab_size: int, highest: int | None) -> None:
    if not len(token_ids):
        raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
    # The common case is decided at C speed: a prompt may have 100000 tokens.
    if operator.countOf(map(type, token_ids), int) == len(token_ids):
        if highest is None:
            highest = max(token_ids) if min(token_ids) >= 0 else vocab_size
        if highest < vocab_size:
            return
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            raise InvalidRequestError(
                f"prompt token {position} is {token_id!r} of type {type(token_id).__name__}; "
                f"token ids must be integers",
                "prompt",
            )
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"prompt token {position} is {token_id}; ids must be in [0, {vocab_size - 1}]",
                "prompt",
            )


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name} has token id {token_id}; ids must be in [0, {vocab_size - 1}]", name
            )
