"""python -m tiny_vllm.bench.core_speed: what the control plane costs, without a model.

Hashing, look-up and insertion of a long prompt, the report of a look-up, and a scheduler
step of many decodes. Microseconds; the median of the repeats counts, the least is beside it.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_vllm.bench.manifest import origin_of_run
from tiny_vllm.config import EngineConfig
from tiny_vllm.protocol import ModelRunnerOutput, SampledToken
from tiny_vllm.request import Request, RequestId
from tiny_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.core.kv_cache_manager import KVCacheManager

VOCAB = 100_000
Timed = Callable[[], float]  # runs once, returns the seconds of the part that counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tiny_vllm.bench.core_speed", description=__doc__
    )
    add = parser.add_argument
    add("--prompt-tokens", type=int, default=32768)
    add("--block-size", type=int, default=64)
    add("--rows", type=int, default=256, help="decodes of the scheduler step")
    add("--repeats", type=int, default=50)
    add("--out", type=Path, help="file for the results and what they were measured on")
    return parser


class Cases:
    """The timed pieces, on fresh objects each time."""

    def __init__(self, num_tokens: int, block_size: int, rows: int) -> None:
        rng = random.Random(0)
        self._prompt = [rng.randrange(VOCAB) for _ in range(num_tokens)]
        self._block_size, self._rows = block_size, rows
        self._count = 0

    def all(self) -> dict[str, Timed]:
        """Name -> piece."""
        seen = self._cache()
        self._insert(seen, self._request())
        schedule, update = self._steps()
        return {
            "hash": self._hash,
            "look up and insert, all new": lambda: self._insert(self._cache(), self._request()),
            "look up and insert, all cached": lambda: self._insert(seen, self._request()),
            "report of the look-up": lambda: self._report(seen),
            "schedule": schedule,
            "update from output": update,
        }

    def _cache(self) -> "KVCacheManager":
        from tiny_vllm.core.kv_cache_manager import KVCacheManager

        return KVCacheManager(2 * len(self._prompt) // self._block_size + 2, self._block_size)

    def _request(self) -> Request:
        self._count += 1
        return Request(RequestId(f"{self._count}"), self._prompt, SamplingParams(), 1)

    def _hash(self) -> float:
        cache, request = self._cache(), self._request()
        start = time.perf_counter()
        cache.prepare(request)
        return time.perf_counter() - start

    def _insert(self, cache: "KVCacheManager", request: Request) -> float:
        cache.prepare(request)
        start = time.perf_counter()
        hit = cache.lookup(request)
        cache.allocate(request, request.num_tokens - hit.num_tokens, hit)
        cache.commit()
        taken = time.perf_counter() - start
        request.num_computed_tokens = request.num_tokens
        cache.free(request)
        return taken

    def _report(self, cache: "KVCacheManager") -> float:
        from tiny_vllm.core.miss_reasons import explain

        request = self._request()
        cache.prepare(request)
        hit = cache.lookup(request)
        start = time.perf_counter()
        explain(cache, request, hit)
        taken = time.perf_counter() - start
        cache.free(request)
        return taken

    def _steps(self) -> tuple[Timed, Timed]:
        """Two halves of a decode step; each runs the other one outside its time."""
        from tiny_vllm.core.scheduler import Scheduler

        config = EngineConfig(
            block_size=self._block_size,
            num_blocks=64 * self._rows,
            max_num_batched_tokens=32 * self._rows,
            max_num_seqs=self._rows,
            max_model_len=64 * self._block_size,
        )
        scheduler = Scheduler(config)
        for row in range(self._rows):
            prompt = [row, *range(20)]
            params = SamplingParams(max_tokens=50 * self._block_size)
            request = Request(RequestId(f"row{row}"), prompt, params, 50 * self._block_size)
            scheduler.add_request(request)

        def step() -> tuple[float, float]:
            start = time.perf_counter()
            planned = scheduler.schedule()
            scheduled = time.perf_counter()
            sampled = {i: SampledToken(5) for i in planned.num_scheduled_tokens}
            result = ModelRunnerOutput(sampled, num_forward_tokens=len(sampled))
            ready = time.perf_counter()
            scheduler.update_from_output(planned, result)
            return scheduled - start, time.perf_counter() - ready

        step()  # the prefill
        return lambda: step()[0], lambda: step()[1]


def measure(num_tokens: int, block_size: int, rows: int, repeats: int) -> dict[str, Any]:
    """All pieces: name -> {"median_us", "least_us"}."""
    results = {}
    for name, piece in Cases(num_tokens, block_size, rows).all().items():
        times = [1e6 * piece() for _ in range(repeats)]
        results[name] = {
            "median_us": round(statistics.median(times), 1),
            "least_us": round(min(times), 1),
        }
    return results


def main() -> None:
    """Measure, print a line a piece, and write the file if one is asked for."""
    options = _parser().parse_args()
    pieces = measure(options.prompt_tokens, options.block_size, options.rows, options.repeats)
    for name, times in pieces.items():
        print(f"{name:<32}{times['median_us']:>10.1f} µs  (least {times['least_us']:.1f})")
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    result = {"settings": settings, "pieces": pieces, **origin_of_run()}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))


if __name__ == "__main__":
    main()
