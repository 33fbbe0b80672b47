"""From the files of a run folder to its summary: a pure function, no clock, no device.

Measured numbers are medians over the repeats of a variant; quotients are formed from
those medians; every repeat is kept beside them.
"""

import hashlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tiny_vllm import metrics
from tiny_vllm.bench.contention import is_contended
from tiny_vllm.bench.folder import RunData
from tiny_vllm.bench.records import RequestRecord
from tiny_vllm.metrics import Peaks, run_roofline
from tiny_vllm.protocol import EngineInfo, StepRecord, TokenLedger

SCHEMA = "tiny-vllm.bench/1"
RANDOM_HIT_LIMIT = 0.01  # hits of a workload whose prompts share nothing
USER = "set by the user"  # the engine's reason for a value it was handed
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
SCALARS = (
    *("wall_s", "prefill_s", "decode_s", "throughput_tok_s", "tpot_e2e_ms", "tpot_decode_ms"),
    *("prefill_tok_s", "peak_memory_bytes", "peak_memory_kind"),
)
CACHE = (
    *("block_hit_rate", "token_hit_rate"),
    *("cached_tokens", "computed_tokens", "recomputed_tokens"),
    *("copied_tokens", "held_requests", "held_steps", "missed", "unbalanced"),
)
ROOFLINE = ("floor_s", "mbu", "mfu", "share", "impossible")


def summarize(data: RunData) -> dict[str, Any]:
    """The content of summary.json (section 7 of the design, with additions)."""
    manifest = data.manifest
    variants = [_variant(data, entry) for entry in manifest["variants"]]
    done = [v for v in variants if not v.get("error")]
    base = _base(manifest["variants"], done)
    others = [v for v in done if base is not None and v is not base]
    summary = {key: manifest[key] for key in ("workload", "model", "seed", "cache_at_start")}
    first = done[0] if done else {}
    return {
        "schema": SCHEMA,
        **summary,
        "device": first.get("device"),
        "dtype": first.get("dtype"),
        "device_name": first.get("device_name"),
        "status": manifest["status"],
        "scale": manifest["scale"],
        "repeats": manifest["repeats"],
        "max_num_seqs": manifest["engine"].get("max_num_seqs"),
        "variants": variants,
        "speedup": {f"{v['name']}/{base['name']}": _speedup(base, v) for v in others if base},
        "outputs_match": {
            f"{v['name']}/{base['name']}": _match(data, v["name"], base["name"])
            for v in others
            if base
        },
        "notes": list(manifest["notes"]),
        "warnings": _warnings(manifest, done),
    }


def _speedup(base: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Ratio of wall times; None unless both did the same work: refusing requests is not speed."""
    same = base["generated_tokens"] == other["generated_tokens"]
    if base["failed"] or other["failed"] or not same:
        return None
    return metrics.ratio(base["wall_s"], other["wall_s"])


def _base(entries: Sequence[Mapping[str, Any]], done: list[dict[str, Any]]) -> Any:
    """What others are compared with: the first finished baseline, else the first one."""
    origins = {entry["name"] for entry in entries if entry["engine"] == "origin"}
    return next((v for v in done if v["name"] in origins), done[0] if done else None)


def _variant(data: RunData, entry: Mapping[str, Any]) -> dict[str, Any]:
    name = entry["name"]
    runs = [run for run in data.manifest["runs"] if run["variant"] == name]
    error = next((run["error"] for run in runs if "error" in run), None)
    if error is None and len(runs) < data.manifest["repeats"]:
        error = "interrupted before it finished"
    good = [run for run in runs if "error" not in run]
    if not good:
        return _empty(data, entry, error or "not run")
    repeats = [_repeat(data, run) for run in good]
    summary = _with_quotients(median_of(repeats))
    info = good[0]["info"]
    result = {
        "name": name,
        "engine": entry["engine"],
        "config": {**info["config"]},
        "reasons": _reasons(info["reasons"], data.manifest["reasons"]),
        "device": info["device"],
        "dtype": info["dtype"],
        "device_name": good[0]["environment"].get("device_name"),
        **summary,
        "outputs_sha256": repeats[0]["outputs_sha256"],
        "outputs_stable": len({r["outputs_sha256"] for r in repeats}) == 1,
        "repeats": repeats,
    }
    return result if error is None else {**result, "error": error}


def _reasons(engine: Mapping[str, str], bench: Mapping[str, str]) -> dict[str, str]:
    """Why each setting has its value. What the benchmark chose, the engine saw as given."""
    mine = {k: why for k, why in bench.items() if engine.get(k, USER) == USER}
    return {**engine, **mine}


def _empty(data: RunData, entry: Mapping[str, Any], error: str) -> dict[str, Any]:
    """A variant that gave no result: all keys of a good one, with null for numbers."""
    count = data.manifest["num_requests"]
    nothing = dict.fromkeys(("mean", "p50", "p90", "p99"))
    return {
        "name": entry["name"],
        "engine": entry["engine"],
        "error": error,
        "config": entry["config"],
        "requests": count,
        "failed": count,
        "prompt_tokens": 0,
        "generated_tokens": 0,
        "errors": [],
        **dict.fromkeys(SCALARS),
        **dict.fromkeys(LATENCIES, nothing),
        "cache": dict.fromkeys(CACHE),
        "kv_bytes": dict.fromkeys(("logical", "physical")),
        "roofline": dict.fromkeys(ROOFLINE),
        "outputs_sha256": None,
        "repeats": [],
    }


def _repeat(data: RunData, run: Mapping[str, Any]) -> dict[str, Any]:
    key = (run["variant"], run["repeat"])
    requests, steps = data.requests.get(key, []), data.steps.get(key, [])
    info = EngineInfo(**run["info"])
    good = [r for r in requests if not r.failed]
    return {
        "requests": len(requests),
        "failed": len(requests) - len(good),
        "errors": _errors(requests),
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "generated_tokens": sum(len(r.output_token_ids) for r in good),
        **_times(run, steps if good else None),
        **_latencies(good),
        "peak_memory_bytes": run["peak_memory"]["num_bytes"],
        "peak_memory_kind": run["peak_memory"]["kind"],
        "cache": _cache(run["ledger"]),
        "kv_bytes": {
            "logical": sum(s.kv_bytes.logical for s in steps),
            "physical": sum(s.kv_bytes.physical for s in steps),
        },
        "roofline": _roofline(run, steps, info) if good else dict.fromkeys(ROOFLINE),
        "contended": is_contended(run["environment"]),
        "other_cores": run["environment"].get("other_cores"),
        "build_s": run["build_s"],
        "warmup_s": run["warmup_s"],
        "outputs_sha256": _outputs_sha256(requests) if good else None,
    }


def _times(run: Mapping[str, Any], steps: Sequence[StepRecord] | None) -> dict[str, Any]:
    """Seconds of a run; None where no request finished: there is nothing to time."""
    if steps is None:
        return {"wall_s": None, "prefill_s": None, "decode_s": None, "decoded_tokens": 0}
    times = metrics.step_times(steps)
    return {
        "wall_s": run["wall_s"],
        "prefill_s": times.prefill_s,
        "decode_s": times.decode_s,
        "decoded_tokens": times.decoded_tokens,
    }


def _errors(requests: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Error texts, most frequent first; texts that differ in numbers alone count as one."""
    texts = [r.error for r in requests if r.error is not None]
    kinds = Counter(re.sub(r"\d+", "#", text) for text in texts)
    example = {re.sub(r"\d+", "#", text): text for text in reversed(texts)}
    return [{"error": example[kind], "requests": n} for kind, n in kinds.most_common()]


def _latencies(requests: Sequence[RequestRecord]) -> dict[str, metrics.Distribution]:
    """TTFT, TPOT, ITL and E2EL in milliseconds; ITL pools the gaps of all requests."""
    pooled = [gap for r in requests for gap in metrics.itl_s(r.token_times)]
    return {
        "ttft_ms": _ms([metrics.ttft_s(r.arrival, r.token_times) for r in requests]),
        "tpot_ms": _ms([metrics.tpot_s(r.token_times) for r in requests]),
        "itl_ms": _ms(pooled),
        "e2el_ms": _ms([metrics.e2el_s(r.arrival, r.token_times) for r in requests]),
    }


def _ms(seconds: Sequence[float | None]) -> metrics.Distribution:
    return metrics.distribution([None if s is None else s * 1e3 for s in seconds])


def _cache(ledger: Mapping[str, int]) -> dict[str, Any]:
    cached, prompt = ledger["cached_tokens"], ledger["prompt_tokens"]
    return {
        "block_hit_rate": metrics.block_hit_rate(ledger["blocks_found"], ledger["blocks_asked"]),
        "token_hit_rate": metrics.token_hit_rate(cached, prompt),
        "cached_tokens": cached,
        "computed_tokens": ledger["computed_tokens"],
        "recomputed_tokens": ledger["recomputed_tokens"],
        "copied_tokens": ledger["copied_tokens"],
        "held_requests": ledger["held_requests"],
        "held_steps": ledger["held_steps"],
        "missed": {reason.value: n for reason, n in TokenLedger(**ledger).missed().items()},
        "unbalanced": _is_unbalanced(ledger),
    }


def _is_unbalanced(ledger: Mapping[str, int]) -> bool:
    """True when the books of a run do not add up."""
    try:
        TokenLedger(**ledger).check()
    except AssertionError:
        return True
    return False


def _roofline(
    run: Mapping[str, Any], steps: Sequence[StepRecord], info: EngineInfo
) -> dict[str, Any]:
    if not run.get("peaks"):
        return dict.fromkeys(ROOFLINE)
    limit = run_roofline(steps, info, Peaks(**run["peaks"]), run["wall_s"])
    return {key: getattr(limit, key) for key in ROOFLINE}


def _outputs_sha256(requests: Sequence[RequestRecord]) -> str:
    rows = [r.output_token_ids for r in requests]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def median_of(values: Sequence[Any]) -> Any:
    """Median of numbers, key by key through dictionaries; flags are true if one is; other
    things (text, None) are taken from the first value."""
    first = values[0]
    if isinstance(first, dict):
        return {key: median_of([v[key] for v in values]) for key in first}
    if isinstance(first, bool):
        return any(values)
    numbers = [v for v in values if isinstance(v, (int, float))]
    if not isinstance(first, (int, float)) or len(numbers) < len(values):
        return first
    middle = statistics.median(numbers)
    return int(middle) if isinstance(first, int) and middle == int(middle) else middle


def _with_quotients(row: dict[str, Any]) -> dict[str, Any]:
    """Add throughput, both TPOTs and the prefill rate, formed from the row's own numbers."""
    tokens = row["generated_tokens"]
    if row["wall_s"] is None:
        names = ("throughput_tok_s", "tpot_e2e_ms", "tpot_decode_ms", "prefill_tok_s")
        return {**row, **dict.fromkeys(names)}
    return {
        **row,
        "throughput_tok_s": metrics.throughput_tok_s(tokens, row["wall_s"]),
        "tpot_e2e_ms": metrics.tpot_e2e_ms(row["wall_s"], tokens),
        "tpot_decode_ms": metrics.tpot_decode_ms(row["decode_s"], row["decoded_tokens"]),
        "prefill_tok_s": metrics.prefill_tok_s(row["cache"]["computed_tokens"], row["prefill_s"]),
    }


def _match(data: RunData, name: str, base: str) -> dict[str, Any]:
    """Compare the first repeats token by token; the first divergence is in trace order.

    Only requests that finished on both sides count; ``equal`` is None without any.
    """
    ours, theirs = data.requests.get((name, 0), []), data.requests.get((base, 0), [])
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not (a.failed or b.failed)]
    divergences = [
        {"request": a.request_id, "position": position}
        for a, b in pairs
        if (position := first_divergence(a.output_token_ids, b.output_token_ids)) is not None
    ]
    return {
        "equal": not divergences if pairs else None,
        "first_divergence": divergences[0] if divergences else None,
        "equal_requests": len(pairs) - len(divergences),
        "compared_requests": len(pairs),
        "requests": len(ours),
    }


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """First position where two outputs differ (also by ending), None when equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def _warnings(manifest: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for variant in done:
        rate, name = variant["cache"]["token_hit_rate"] or 0.0, variant["name"]
        if manifest["is_random"] and rate > RANDOM_HIT_LIMIT:
            found.append(
                f"{name}: {rate:.1%} of a random workload came from the cache; it should be 0"
            )
        if variant["cache"]["unbalanced"]:
            found.append(f"{name}: the token ledger does not balance; do not believe its counts")
        if variant["roofline"]["impossible"]:
            found.append(f"{name}: faster than the physical floor of this machine; do not believe")
        if variant["contended"]:
            found.append(
                f"{name}: other programs used {variant['other_cores']:.1f} cores during a run; "
                "its times are not the engine's: repeat on a quiet machine"
            )
        if variant["failed"]:
            found.append(_failures(variant))
        if not variant["outputs_stable"]:
            found.append(f"{name}: the outputs differ between repeats")
    return found


def _failures(variant: Mapping[str, Any]) -> str:
    """How many requests of a variant failed, and the most frequent reason."""
    text = f"{variant['name']}: {variant['failed']} of {variant['requests']} requests failed"
    if not variant["errors"]:
        return text
    first = variant["errors"][0]
    return f"{text}; {first['requests']} times: {first['error']}"
