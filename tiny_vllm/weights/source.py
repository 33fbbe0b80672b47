"""The interface every reader of stored weights implements."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

# Keys and values as in a Hugging Face config.json.
Config = dict[str, Any]


class WeightSource(Protocol):
    """Named tensors of one model.

    Attributes:
        config: Hugging Face config.json keys; ``eos_token_id`` is a list.
    """

    config: Config

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, CPU tensor) one at a time, float32, float16 or bfloat16.

        A yielded tensor is the caller's. Tied output weights are not repeated.

        Raises:
            ModelLoadError: data that cannot be read; names the file.
        """
        ...
