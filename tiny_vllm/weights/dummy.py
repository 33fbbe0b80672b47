"""Random weights for shapes without files: seeded, quick, the same on every machine.

Each tensor draws from a generator seeded by (seed, name), so neither order nor the
presence of other tensors changes it.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch

_THREADS = min(16, os.cpu_count() or 1)
_SCALE = 0.02  # the initialisation range most decoders are trained from


def dummy_tensors(
    expected: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a random CPU tensor for each expected name and shape.

    Matrices and biases are normal with standard deviation 0.02; norm weights lie around 1.
    """

    def draw(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_tensor_seed(seed, name))
        values = torch.empty(expected[name], dtype=dtype)
        values.normal_(0.0, _SCALE, generator=generator)
        return values.add_(1.0) if _is_norm(name) else values

    # One generator is one thread's work; a window of them bounds the memory.
    with ThreadPoolExecutor(_THREADS) as pool:
        names = iter(expected)
        window = deque((n, pool.submit(draw, n)) for n in islice(names, 2 * _THREADS))
        while window:
            name, values = window.popleft()
            yield name, values.result()
            window.extend((n, pool.submit(draw, n)) for n in islice(names, 1))


def _tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _is_norm(name: str) -> bool:
    return name.endswith(".weight") and "norm" in name.split(".")[-2]
