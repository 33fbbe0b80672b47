"""The order in which an offline batch uses the prefix cache best."""

from collections.abc import Sequence
from itertools import chain

from tiny_vllm.core.block_hash import pack_tokens
from tiny_vllm.errors import InvalidRequestError

_MIN_COMMON = 16  # tokens; less in common is no reason to move a prompt


def depth_first(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Indices of ``prompts`` along their prefix tree: who shares a beginning runs together.

    Families of prompts come in the order of their first member; a prompt that shares
    nothing keeps its place among them. Where a prompt has ids that cannot be packed, the
    order stays as it is: the engine is to say what is wrong.
    """
    try:
        packed = [pack_tokens(prompt) for prompt in prompts]
    except InvalidRequestError:
        return list(range(len(prompts)))
    width = len(pack_tokens([0] * _MIN_COMMON))
    families: list[list[int]] = []
    for index in sorted(range(len(packed)), key=packed.__getitem__):
        if families and packed[families[-1][-1]][:width] == packed[index][:width]:
            families[-1].append(index)
        else:
            families.append([index])
    families.sort(key=min)
    return list(chain.from_iterable(families))
