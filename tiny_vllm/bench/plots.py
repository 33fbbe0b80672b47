"""comparison.png, drawn from summary.json and steps.jsonl alone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_vllm.bench.folder import PLOT, RunData, RunKey
from tiny_vllm.bench.table import token_hit_rate
from tiny_vllm.protocol import StepRecord

PREFILL, DECODE, IDLE, FLOOR, TOKEN, BLOCK = (
    "#4477aa",
    "#66ccee",
    "#cccccc",
    "#aa3377",
    "#228833",
    "#ccbb44",
)
LINES = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
Row = Mapping[str, Any]


def draw_comparison(summary: Row, data: RunData, path: str | Path) -> Path:
    """Write the figure for a run; ``path`` is a file or the run folder.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08)
    target = Path(path) / PLOT if Path(path).is_dir() else Path(path)
    done = [v for v in summary["variants"] if not v.get("error")]
    figure, axes = plt.subplots(2, 3, figsize=(15, 8.4), layout=layout)
    panels = (_wall, _throughput, _tpot, _hits, _kv_bytes)
    for axis, panel in zip(axes.flat, panels, strict=False):
        panel(axis, done)
    _timeline(axes.flat[5], done, data.steps)
    scale = "" if summary["scale"] == 1 else f", scale {summary['scale']}"
    figure.suptitle(
        f"{summary['workload']}{scale} · {summary['model']} · "
        f"{summary['device_name']} {summary['dtype']} · medians of {summary['repeats']} run(s)",
        fontsize=13,
    )
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target


def _names(axis: Any, done: Sequence[Row]) -> None:
    """One bar position per variant, first on top."""
    axis.set_yticks(range(len(done)), [v["name"] for v in done])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.18)


def _label(axis: Any, x: float, y: float, text: str) -> None:
    axis.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=9)


def _floor_marks(axis: Any, values: Sequence[float | None], bottom: float = 0.42) -> None:
    """A mark over each bar where the physical limit lies."""
    label: str | None = "roofline floor"
    for y, value in enumerate(values):
        if value is not None:
            axis.plot([value, value], [y - 0.42, y + bottom], color=FLOOR, lw=2.5, label=label)
            label = None


def _legend(axis: Any) -> None:
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, fontsize=8, frameon=False)


def _wall(axis: Any, done: Sequence[Row]) -> None:
    left = [0.0] * len(done)
    walls, prefill, decode = (
        [v[key] or 0.0 for v in done] for key in ("wall_s", "prefill_s", "decode_s")
    )
    idle = [max(0.0, w - p - d) for w, p, d in zip(walls, prefill, decode, strict=True)]
    for values, color, name in (
        (prefill, PREFILL, "steps with prefill"),
        (decode, DECODE, "decode steps"),
        (idle, IDLE, "between steps"),
    ):
        axis.barh(range(len(done)), values, 0.6, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for y, wall in enumerate(walls):
        _label(axis, wall, y, f"{wall:.3g} s")
    _floor_marks(axis, [v["roofline"]["floor_s"] for v in done])
    axis.set_title("Wall time (s), less is better")
    _names(axis, done)
    _legend(axis)


def _throughput(axis: Any, done: Sequence[Row]) -> None:
    values = [v["throughput_tok_s"] or 0.0 for v in done]
    axis.barh(range(len(done)), values, 0.6, color=TOKEN)
    for y, value in enumerate(values):
        _label(axis, value, y, f"{value:,.4g}")
    axis.set_title("Throughput (generated tokens/s), more is better")
    _names(axis, done)


def _pairs(
    axis: Any, done: Sequence[Row], bars: Sequence[tuple[str, str, Callable[[Row], Any]]], form: str
) -> None:
    """Two bars per variant with their values; an undefined one says so."""
    height = 0.8 / len(bars)
    for number, (name, color, value_of) in enumerate(bars):
        ys = [y - 0.4 + height * (number + 0.5) for y in range(len(done))]
        values = [value_of(v) for v in done]
        axis.barh(ys, [v or 0.0 for v in values], height * 0.9, color=color, label=name)
        for y, value in zip(ys, values, strict=True):
            _label(axis, value or 0.0, y, "n/a" if value is None else f"{value:{form}}")
    _names(axis, done)


def _tpot(axis: Any, done: Sequence[Row]) -> None:
    bars = (
        ("end-to-end", PREFILL, lambda v: v["tpot_e2e_ms"]),
        ("decode-only", DECODE, lambda v: v["tpot_decode_ms"]),
    )
    _pairs(axis, done, bars, ".4g")
    _floor_marks(axis, [_floor_per_token_ms(v) for v in done], bottom=0.0)  # end-to-end bars
    axis.set_title("TPOT over all requests (ms/token)")
    _legend(axis)


def _floor_per_token_ms(variant: Row) -> float | None:
    floor, tokens = variant["roofline"]["floor_s"], variant["generated_tokens"]
    return None if floor is None or not tokens else 1e3 * floor / tokens


def _hits(axis: Any, done: Sequence[Row]) -> None:
    bars = (
        ("prompt tokens", TOKEN, token_hit_rate),
        ("full blocks", BLOCK, lambda v: v["cache"]["block_hit_rate"]),
    )
    _pairs(axis, done, bars, ".1%")
    axis.set_xlim(0, 1.18)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.set_title("Prefix-cache hit rate")
    _legend(axis)


def _kv_bytes(axis: Any, done: Sequence[Row]) -> None:
    bars = (
        ("read per request", PREFILL, lambda v: v["kv_bytes"]["logical"] / 2**30),
        ("read by the plan", TOKEN, lambda v: v["kv_bytes"]["physical"] / 2**30),
    )
    _pairs(axis, done, bars, ".3g")
    axis.set_title("KV bytes that attention reads (GiB)")
    _legend(axis)


def _timeline(axis: Any, done: Sequence[Row], steps: Mapping[RunKey, Sequence[StepRecord]]) -> None:
    """Tokens out over time in the first repeat: waiting, prefill and decode in one line."""
    for variant, color in zip(done, LINES * len(done), strict=False):
        times, totals = [0.0], [0]
        for step in steps.get((variant["name"], 0), []):
            times.append(step.end)
            totals.append(totals[-1] + step.num_sampled)
        axis.plot(times, totals, color=color, lw=1.8, label=variant["name"], drawstyle="steps-post")
    axis.set_title("Tokens generated over time (s), first run")
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    _legend(axis)
