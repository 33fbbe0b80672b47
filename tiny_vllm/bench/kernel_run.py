"""Runs the cases of `bench.kernels`: check, then time, op by op. Imports torch."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from tiny_vllm.bench.kernel_cases import OPS, Case
from tiny_vllm.bench.kernel_report import least_seconds, result_row
from tiny_vllm.bench.kernel_timing import Built, Call, Place, Stopwatch
from tiny_vllm.bench.peaks import get_peaks
from tiny_vllm.config import ModelConfig
from tiny_vllm.metrics import Peaks


def run_cases(
    config: ModelConfig,
    cases: Sequence[Case],
    results: dict[str, Any],
    *,
    measures_peaks: bool = True,
    quiet: bool = False,
) -> None:
    """Fill the peaks, notes and cases of ``results``, which names device, dtype and repeats."""
    from tiny_vllm.ops.kernels.launch import use_pdl

    device = torch.device(results["device"])
    dtype = results["dtype"]
    with _on_device(device), torch.inference_mode():
        peaks = get_peaks(results["device"], dtype) if measures_peaks else None
        results["peaks"] = peaks and asdict(peaks)
        place = Place(config, getattr(torch, dtype), device, use_pdl(device))
        watch = Stopwatch(device, results["repeats"])
        for number, case in enumerate(cases, 1):
            torch.manual_seed(0)
            row = _run_case(case, place, watch, peaks, results["notes"])
            results["cases"].append(row)
            if not quiet:
                shown = f"{row['us']:.2f} µs" if row["error"] is None else f"FAILED: {row['error']}"
                print(f"[{number}/{len(cases)}] {case.name}: {shown}", file=sys.stderr, flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()


@contextlib.contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    """The device, and a stream of its own: graphs are not captured on the default one."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _run_case(
    case: Case, place: Place, watch: Stopwatch, peaks: Peaks | None, notes: list[str]
) -> dict[str, Any]:
    """Check, then time. Whatever an op raises is its own failure, not the run's."""
    try:
        built = _build(case, place)
        error = built.check()
        if error is not None:
            return result_row(case, peaks, error=error)
        guess_s = least_seconds(case, peaks)
        seconds = watch.seconds(built.kernel, built.copies, guess_s, built.captures)
    except Exception as error:  # compilers and drivers raise what they like
        return result_row(case, peaks, error=_first_line(error))
    references: dict[str, float | None] = {}
    for name, call in built.references.items():
        references[name] = _reference(name, call, case, built, watch, guess_s, notes)
    return result_row(
        case,
        peaks,
        seconds=seconds,
        references=references,
        copies=built.copies,
        facts=built.facts,
    )


def _build(case: Case, place: Place) -> Built:
    module, _, function = OPS[case.op].builder.partition(":")
    builder: Callable[[Case, Place], Built] = getattr(importlib.import_module(module), function)
    return builder(case, place)


def _reference(
    name: str,
    call: Call,
    case: Case,
    built: Built,
    watch: Stopwatch,
    guess_s: float,
    notes: list[str],
) -> float | None:
    """Seconds of a reference, None where this torch or GPU lacks it."""
    try:
        return watch.seconds(call, built.copies, guess_s, built.references_capture)
    except (RuntimeError, NotImplementedError) as error:
        notes.append(f"{case.name}: {name} did not run: {_first_line(error)}")
        return None


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"
