"""Random weights for shapes without files: seeded, quick, the same on every machine.

Each tensor draws from a generator seeded by (seed, name), so neither order nor the
presence of other tensors changes it.
"""

import hashlib
from collections.abc import Iterator, Mapping

import torch

_SCALE = 0.02  # the initialisation range most decoders are trained from


def dummy_tensors(
    expected: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a random CPU tensor for each expected name and shape.

    Matrices and biases are normal with standard deviation 0.02; norm weights lie around 1.
    """
    for name, shape in expected.items():
        generator = torch.Generator().manual_seed(_tensor_seed(seed, name))
        values = torch.empty(shape, dtype=dtype).normal_(0.0, _SCALE, generator=generator)
        yield name, values.add_(1.0) if _is_norm(name) else values


def _tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _is_norm(name: str) -> bool:
    return name.endswith(".weight") and "norm" in name.split(".")[-2]
