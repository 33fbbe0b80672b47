"""Results of `bench.kernels`: one row a case, the table, the run folder and its chart. No torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tiny_vllm.bench.kernel_cases import OPS, Case
from tiny_vllm.bench.table import NONE, PIPE_WIDTH
from tiny_vllm.errors import ConfigError
from tiny_vllm.metrics import Peaks

RESULTS, CHART, MANIFEST = "results.json", "kernels.png", "manifest.json"
CACHE_FACTOR = 2  # buffers below so many times the cache may still be found there
COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")
Row = Mapping[str, Any]


def result_row(
    case: Case,
    peaks: Peaks | None,
    *,
    seconds: float | None = None,
    references: Mapping[str, float | None] | None = None,
    copies: int = 1,
    facts: Mapping[str, float] | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """The result of a case; ``seconds`` is None where it failed.

    ``share`` is the least time that bytes and FLOPs allow over the time taken; ``gain`` is
    the time of the fastest reference over the kernel's.
    """
    row: dict[str, Any] = {"op": case.op, "shape": case.label, "rows": case.rows}
    row |= {"status": "ok" if error is None else "failed", "error": error}
    row |= {"us": None, "bytes": case.num_bytes, "flops": case.flops}
    row |= {"tb_s": None, "tflop_s": None, "share": None, "bound": None, "cached": None}
    row |= {"references_us": {}, "gain": None, **(facts or {})}
    if seconds is None:
        return row
    row["us"] = 1e6 * seconds
    row["tb_s"], row["tflop_s"] = case.num_bytes / seconds / 1e12, case.flops / seconds / 1e12
    if peaks is not None:
        memory_s, compute_s = case.num_bytes / peaks.bandwidth, case.flops / peaks.flops
        row["share"] = max(memory_s, compute_s) / seconds
        row["bound"] = "memory" if memory_s >= compute_s else "compute"
        row["cached"] = copies * case.num_bytes < CACHE_FACTOR * peaks.cache_bytes
    known = {name: t for name, t in (references or {}).items() if t is not None}
    row["references_us"] = {
        name: None if t is None else 1e6 * t for name, t in (references or {}).items()
    }
    row["gain"] = min(known.values()) / seconds if known else None
    return row


def least_seconds(case: Case, peaks: Peaks | None) -> float:
    """No call is faster; without peaks, a guess."""
    bandwidth, flops = (peaks.bandwidth, peaks.flops) if peaks else (4e12, 4e14)
    return max(case.num_bytes / bandwidth, case.flops / flops, 1.5e-6)


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"


def beside(row: Row) -> str:
    """The references in words: "torch 12.3, cuDNN N/A"."""
    times = row["references_us"].items()
    return ", ".join(f"{name} {_number(us, ',.1f')}" for name, us in times)


def _share(row: Row) -> str:
    if row["share"] is None:
        return NONE
    return f"{100 * row['share']:.1f} %{'*' if row['cached'] else ''} {row['bound']}"


def cells(row: Row) -> list[str]:
    """A line of the table."""
    work = [f"{row['bytes'] / 1e6:,.3g}", f"{row['flops'] / 1e9:,.3g}"]
    if row["status"] != "ok":
        return [row["op"], row["shape"], "FAILED", *work, "", "", "", "", ""]
    speed = [_number(row["tb_s"], ".3g"), _number(row["tflop_s"], ".3g"), _share(row)]
    gain = NONE if row["gain"] is None else f"{row['gain']:.2f}x"
    return [row["op"], row["shape"], _number(row["us"], ",.2f"), *work, *speed, beside(row), gain]


_TITLES = ("op", "shape", "µs", "MB", "GFLOP", "TB/s", "TFLOP/s", "share of peak", "beside it (µs)")


def print_results(results: Row, console: Console | None = None) -> None:
    """Print the table and its notes; a pipe gets lines wide enough not to wrap."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPE_WIDTH)
    table = Table(box=box.SIMPLE_HEAD)
    for number, title in enumerate((*_TITLES, "gain")):
        table.add_column(title, justify="left" if number in (0, 1, 8) else "right")
    for row in results["cases"]:
        table.add_row(*cells(row))
    console.print(table)
    for line in notes(results):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def notes(results: Row) -> list[str]:
    """Below the table, one fact a line."""
    peaks, rows = results["peaks"], results["cases"]
    lines = [f"{results['model']} {results['dtype']} on {results['device_name']}"]
    if peaks is not None:
        bandwidth, flops = peaks["bandwidth"] / 1e12, peaks["flops"] / 1e12
        lines.append(f"measured peaks: {bandwidth:.2f} TB/s read, {flops:.0f} TFLOP/s of products")
    if any(row["cached"] for row in rows):
        lines.append("* its buffers fit the L2 cache: memory is no limit")
    lines += [f"note: {note}" for note in results["notes"]]
    for row in rows:
        if row["status"] != "ok":
            lines.append(f"FAILED {row['op']} {row['shape']}: {row['error']}")
    return lines


def list_lines(cases: Sequence[Case]) -> list[str]:
    """What `--list` prints: each op, then its shapes with their work."""
    lines = []
    for op in dict.fromkeys(case.op for case in cases):
        lines.append(f"{op}: {OPS[op].about}")
        for case in cases:
            if case.op == op:
                work = f"{case.num_bytes / 1e6:12,.3f} MB {case.flops / 1e9:10,.3f} GFLOP"
                lines.append(f"  {case.label:<28}{work}")
    return lines


def write_json(path: Path, values: Row) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def open_folder(path: Path, manifest: Row, force: bool) -> None:
    """Make the run folder.

    Raises:
        ConfigError: it holds finished results, or cannot be written.
    """
    if (path / RESULTS).exists() and not force:
        raise ConfigError(
            f"--out {path} holds the results of an earlier run; give another folder, or --force "
            "to overwrite them"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in (RESULTS, CHART):
            (path / name).unlink(missing_ok=True)
        write_json(path / MANIFEST, manifest)
    except OSError as error:
        raise ConfigError(
            f"--out {path} cannot be written: {error.strerror}; give a folder of your own"
        ) from error


def draw_chart(results: Row, path: Path) -> None:
    """Share of the measured peak of every case, a color an op.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in results["cases"] if row["status"] == "ok"]
    shares = [100 * (row["share"] or 0.0) for row in rows]
    ops = list(dict.fromkeys(row["op"] for row in rows))
    colors = [COLORS[ops.index(row["op"]) % len(COLORS)] for row in rows]
    height = max(2.5, 0.2 * len(rows) + 1.2)
    figure, axis = plt.subplots(figsize=(10, height), layout="constrained")
    axis.barh(range(len(rows)), shares, 0.75, color=colors)
    for y, (row, share) in enumerate(zip(rows, shares, strict=True)):
        text = f"{row['us']:,.1f} µs" + ("" if row["gain"] is None else f", {row['gain']:.2f}x")
        axis.annotate(text, (share, y), (4, 0), textcoords="offset points", va="center", fontsize=7)
    axis.set_yticks(range(len(rows)), [f"{r['op']}  {r['shape']}" for r in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.axvline(100, color="#888888", lw=0.8)
    axis.set_xlim(0, max([115.0, *(1.15 * share for share in shares)]))
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("share of the measured peak (%), time, gain over what stands beside it")
    axis.set_title(f"{results['model']} {results['dtype']} on {results['device_name']}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
