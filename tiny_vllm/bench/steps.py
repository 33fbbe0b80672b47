"""python -m tiny_vllm.bench.steps: time to all first tokens, and time a step, by workload.

One engine runs several workloads one after the other, each from an empty prefix cache:
``first`` is the time until every request has its first token (a run with one token each),
``step`` = (total - first) / (tokens - 1). A JSON line each; the best of the repeats counts.
Published figures of other engines are often of this kind.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_vllm.bench.manifest import origin_of_run
from tiny_vllm.bench.trace import TraceRequest
from tiny_vllm.bench.workloads import build_workload
from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import TinyVllmError
from tiny_vllm.protocol import Engine
from tiny_vllm.sampling_params import SamplingParams


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tiny_vllm.bench.steps", description=__doc__)
    add = parser.add_argument
    add("workloads", help="built-in workloads, comma separated")
    add("--model", default="llama-3.2-1b")
    add("--load-format", default="dummy")
    add("--device", default="cuda")
    add("--attention", default="forest", choices=("forest", "per-request"))
    add("--scale", type=float, default=1.0, help="shrinks the workloads; said in the results")
    add("--repeats", type=int, default=2)
    add("--out", type=Path, help="file for all lines and what they were measured on")
    return parser


def run_requests(engine: Engine, requests: Sequence[TraceRequest], prefix: str) -> dict[str, Any]:
    """Run requests that arrive at once; seconds, tokens and KV bytes of the decode steps."""
    assert engine.reset_prefix_cache(), "requests of an earlier run hold blocks"
    steps: list[float] = []
    logical = physical = generated = 0
    start = time.perf_counter()
    for request in requests:
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        engine.add_request(prefix + request.request_id, request.token_ids, params)
    while engine.has_unfinished_requests():
        engine.step()
        record = engine.last_step
        assert record is not None
        generated += record.num_sampled
        if record.kind == "decode":
            steps.append(record.end - record.start)
            logical += record.kv_bytes.logical
            physical += record.kv_bytes.physical
    seconds = time.perf_counter() - start
    median = statistics.median(steps) * 1e3 if steps else None
    return {
        "seconds": seconds,
        "generated_tokens": generated,
        "kv_logical_over_physical": logical / physical if physical else None,
        "median_step_call_ms": median,
    }


def measure(engine: Engine, name: str, scale: float, repeats: int) -> dict[str, Any]:
    """One line of results."""
    vocab_size = engine.info.vocab_size
    draws = [
        build_workload(name, vocab_size, _no_encoder, seed=i, scale=scale).requests
        for i in range(repeats + 1)
    ]
    tokens = max(r.max_tokens for r in draws[0])
    run_requests(engine, _capped(draws[0], 4), "warm")
    best: dict[str, Any] = {}
    for i, requests in enumerate(draws[1:]):
        first = run_requests(engine, _capped(requests, 1), f"first{i}")["seconds"]
        result = run_requests(engine, requests, f"all{i}")
        if not best or result["seconds"] < best["total_s"]:
            step = (result["seconds"] - first) / (tokens - 1) * 1e3 if tokens > 1 else None
            total = first if tokens == 1 else result["seconds"]
            best = {
                "workload": name,
                "scale": scale,
                "first_ms": first * 1e3,
                "step_ms": step,
                "total_s": total,
                "out_tok_s": result["generated_tokens"] / total,
                "kv_logical_over_physical": result["kv_logical_over_physical"],
            }
    return best


def _capped(requests: Sequence[TraceRequest], limit: int) -> list[TraceRequest]:
    return [replace(r, max_tokens=min(limit, r.max_tokens)) for r in requests]


def _no_encoder() -> Any:
    raise TinyVllmError("this workload is text: use `tiny-vllm bench`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    from tiny_vllm.engine.extended import ExtendedEngine

    config = EngineConfig.create(
        model=options.model,
        load_format=options.load_format,
        device=options.device,
        attention=options.attention,
        skip_tokenizer_init=True,
    )
    began = time.perf_counter()
    engine: Any = ExtendedEngine.build(config)
    lines = []
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    for name in options.workloads.split(","):
        lines.append(measure(engine, name, options.scale, options.repeats))
        print(json.dumps(_rounded(lines[-1])), flush=True)
    if options.out is not None:
        facts = {"config": engine.info.config, "run": origin_of_run(), "results": lines}
        options.out.write_text(json.dumps(facts, indent=1, default=str), encoding="utf-8")
    return 0


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}


if __name__ == "__main__":
    raise SystemExit(main())
