"""python -m tiny_vllm.bench.kernels: every GPU op against its limit and against plain torch.

Each op is compared with its definition first; a wrong one is FAILED, not timed, and makes
the exit status 1. The last line of stdout is JSON. Torch is imported when a run starts.
"""

import argparse
import datetime
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_vllm.bench.kernel_cases import (
    FULL,
    TINY,
    TINY_CONFIG,
    Case,
    make_cases,
    select_ops,
)
from tiny_vllm.bench.kernel_report import (
    CHART,
    MANIFEST,
    RESULTS,
    draw_chart,
    list_lines,
    open_folder,
    print_results,
    write_json,
)
from tiny_vllm.bench.manifest import origin_of_run
from tiny_vllm.config import DTYPE_BYTES, ModelConfig
from tiny_vllm.errors import ConfigError, TinyVllmError

WRONG, UNUSABLE, INTERRUPTED = 1, 2, 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tiny_vllm.bench.kernels",
        description="Time every GPU op against the measured peak and against plain torch.",
    )
    add = parser.add_argument
    add("--model", default="llama-3.2-1b", help="whose shapes: an alias, a folder or a file")
    add("--dtype", default="bfloat16", choices=tuple(DTYPE_BYTES))
    add("--device", default="cuda", help="cuda or cuda:N")
    add("--only", action="append", default=[], metavar="NAME", help="an op or a part of its name")
    add("--repeats", type=_positive, default=7, help="replays, of which the median counts")
    add("--out", type=Path, help="run folder; default: runs/<time>-kernels")
    add("--force", action="store_true", help="overwrite the results in the --out folder")
    add("--list", action="store_true", help="print ops and shapes, run nothing")
    add("--quiet", "-q", action="store_true", help="no progress on stderr")
    add("--tiny", action="store_true", help=argparse.SUPPRESS)  # for Triton's interpreter
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        ops = select_ops(options.only)
        config = TINY_CONFIG if options.tiny else _model_config(options.model)
        cases = make_cases(config, options.dtype, TINY if options.tiny else FULL, ops)
        if options.list:
            print("\n".join(list_lines(cases)))
            return 0
        _check_machine(options)
        return _run(options, config, cases)
    except TinyVllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("interrupted: the run folder keeps what was measured", file=sys.stderr)
        return INTERRUPTED


def _model_config(model: str) -> ModelConfig:
    from tiny_vllm.hub import resolve_model
    from tiny_vllm.models.registry import parse_model_config
    from tiny_vllm.weights import read_config

    files = resolve_model(model)
    return parse_model_config(read_config(files, "dummy"))


def _check_machine(options: argparse.Namespace) -> None:
    """Raise ConfigError where the kernels cannot run."""
    import torch

    if importlib.util.find_spec("triton") is None:
        raise ConfigError("the kernels need the package triton: pip install triton")
    if options.tiny and os.environ.get("TRITON_INTERPRET") == "1":
        return
    name, _, index = options.device.partition(":")
    if name != "cuda" or not torch.cuda.is_available():
        why = "no CUDA device" if name == "cuda" else f"--device {options.device}"
        raise ConfigError(f"the kernels run on a GPU only ({why}); --list shows what would run")
    count = torch.cuda.device_count()
    if index and not (index.isascii() and index.isdecimal() and int(index) < count):
        raise ConfigError(f"--device {options.device}: this machine has {count} CUDA device(s)")


def _run(options: argparse.Namespace, config: ModelConfig, cases: Sequence[Case]) -> int:
    from tiny_vllm.bench.device import describe_device
    from tiny_vllm.bench.kernel_run import run_cases

    folder = options.out or _new_folder()
    settings = {key: str(value) for key, value in vars(options).items()}
    facts = describe_device(options.device)
    manifest: dict[str, Any] = {**origin_of_run(), "options": settings, **facts}
    open_folder(folder, {**manifest, "status": "running"}, options.force)
    results: dict[str, Any] = {
        "model": "tiny" if options.tiny else options.model,
        "dtype": options.dtype,
        "device": options.device,
        "device_name": facts["device_name"],
        "repeats": options.repeats,
        "failed": 0,
        "peaks": None,
        "notes": [],
        "cases": [],
    }
    status = "failed"
    try:
        run_cases(config, cases, results, measures_peaks=not options.tiny, quiet=options.quiet)
        status = "complete"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        results["failed"] = sum(row["status"] != "ok" for row in results["cases"])
        write_json(folder / RESULTS, results)
        write_json(folder / MANIFEST, {**manifest, "status": status})
    _report(folder, results)
    return WRONG if results["failed"] else 0


def _report(folder: Path, results: dict[str, Any]) -> None:
    try:
        draw_chart(results, folder / CHART)
    except ImportError:
        results["notes"].append("no chart: matplotlib is not installed")
    print_results(results)
    print(f"run folder: {folder}")
    print(json.dumps({**results, "folder": str(folder)}, separators=(",", ":")), flush=True)


def _new_folder() -> Path:
    """A new folder under runs/; two runs may start in one second."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([""], (f"-{i}" for i in itertools.count(2)))
    folders = (Path("runs") / f"{stamp}-kernels{name}" for name in names)
    return next(folder for folder in folders if not folder.exists())


if __name__ == "__main__":
    sys.exit(main())
