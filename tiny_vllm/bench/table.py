"""What `bench` prints for people, made from the summary alone."""

from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

NONE = "N/A"
PIPE_WIDTH = 200  # enough for every column on one line
Row = Mapping[str, Any]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return NONE if value is None else f"{value:{form}}{unit}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def token_hit_rate(variant: Row) -> float | None:
    """Cached share of the prompt tokens; None for an engine that looks nothing up."""
    cache = variant["cache"]
    looked_up = cache["block_hit_rate"] is not None or cache["cached_tokens"]
    return cache["token_hit_rate"] if looked_up else None


def _hit_rate(variant: Row) -> str:
    rate = token_hit_rate(variant)
    return _percent(rate)


def _memory(variant: Row) -> str:
    size = variant["peak_memory_bytes"]
    return NONE if size is None else f"{size / 2**20:.0f} MiB {variant['peak_memory_kind']}"


def _roofline(variant: Row) -> str:
    limit = variant["roofline"]
    if limit["impossible"]:
        return "IMPOSSIBLE"
    return _percent(limit["share"])


def _build(variant: Row) -> str:
    if variant.get("error"):
        return "failed"
    return f"{variant['engine']} {variant['dtype']}"


def _requests(variant: Row) -> str:
    failed = variant["failed"]
    return f"{variant['requests']}" + (f" ({failed} failed)" if failed else "")


# the reference's table, column for column
MAIN: Mapping[str, Callable[[Row], str]] = {
    "scenario": lambda v: v["name"],
    "build": _build,
    "generated tokens": lambda v: str(v["generated_tokens"]),
    "run time": lambda v: _number(v["wall_s"] and 1e3 * v["wall_s"], ",.1f", " ms"),
    "throughput": lambda v: _number(v["throughput_tok_s"], ",.1f", " tok/s"),
    "TPOT end-to-end": lambda v: _number(v["tpot_e2e_ms"], ".4g", " ms/tok"),
    "TPOT decode-only": lambda v: _number(v["tpot_decode_ms"], ".4g", " ms/tok"),
    "KV-cache hit rate": _hit_rate,
}
MORE: Mapping[str, Callable[[Row], str]] = {
    "scenario": lambda v: v["name"],
    "requests": _requests,
    "prefill time": lambda v: _number(v["prefill_s"] and 1e3 * v["prefill_s"], ",.1f", " ms"),
    "peak memory": _memory,
    "TTFT p50 / p99": lambda v: (
        f"{_number(v['ttft_ms']['p50'], ',.0f')} / {_number(v['ttft_ms']['p99'], ',.0f', ' ms')}"
    ),
    "TPOT p50": lambda v: _number(v["tpot_ms"]["p50"], ".4g", " ms"),
    "ITL p99": lambda v: _number(v["itl_ms"]["p99"], ",.1f", " ms"),
    "roofline": _roofline,
    "MBU / MFU": lambda v: f"{_percent(v['roofline']['mbu'])} / {_percent(v['roofline']['mfu'])}",
}


def _table(columns: Mapping[str, Callable[[Row], str]], variants: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for number, title in enumerate(columns):
        table.add_column(title, justify="left" if number < 2 else "right")
    for variant in variants:
        table.add_row(*(cell(variant) for cell in columns.values()))
    return table


def _match_line(pair: str, match: Row, dtypes: set[str]) -> str:
    compared, total = match["compared_requests"], match["requests"]
    if not compared:
        return f"outputs {pair}: nothing to compare (0 of {total} finished)"
    part = "" if compared == total else f"{compared} of {total} finished "
    if match["equal"]:
        return f"outputs {pair}: equal, token for token ({part or f'{total} '}requests)"
    first = match["first_divergence"]
    return (
        f"outputs {pair}: {match['equal_requests']} of {compared} {part and 'finished '}requests "
        f"equal; first divergence in request {first['request']} at token {first['position']}"
        + _rounding(dtypes)
    )


def _rounding(dtypes: set[str]) -> str:
    """Why outputs may differ: in 16 bits the logits of two tokens are often equal or nearly so."""
    short = sorted(dtypes - {"float32"})
    if not short:
        return ""
    return (
        f" ({' and '.join(short)}: other batch shapes round differently; "
        "--dtype float32 compares exactly)"
    )


def _speedup_line(pair: str, value: float | None) -> str:
    return f"speedup {pair}: {_number(value, '.2f', 'x')}" + (
        "" if value is not None else " (the variants did not do the same work)"
    )


def lines(summary: Row) -> list[str]:
    """Everything below the tables, one fact a line."""
    dtypes = {v["name"]: str(v.get("dtype")) for v in summary["variants"]}
    found = [_speedup_line(*item) for item in summary["speedup"].items()]
    found += [
        _match_line(pair, match, {dtypes[name] for name in pair.split("/")})
        for pair, match in summary["outputs_match"].items()
    ]
    found.append(
        f"medians of {summary['repeats']} run(s); prefix cache {summary['cache_at_start']} at "
        f"the start; max_num_seqs={summary['max_num_seqs']} for every variant"
    )
    if summary["scale"] != 1:
        found.append(f"scale={summary['scale']}: all lengths of the workload are shrunk")
    found += [f"note: {note}" for note in summary["notes"]]
    found += [f"WARNING: {warning}" for warning in summary["warnings"]]
    found += [f"FAILED {v['name']}: {v['error']}" for v in summary["variants"] if v.get("error")]
    if summary["status"] != "complete":
        found.append(f"this run is {summary['status']}")
    return found


def print_summary(summary: Row, console: Console | None = None) -> None:
    """Print tables and lines; a pipe gets tables wide enough not to wrap."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPE_WIDTH)
    where = f"{summary['device_name'] or '?'} ({summary['device'] or 'no device'})"
    console.print(
        f"workload {summary['workload']}, model {summary['model']}, {where}, "
        f"seed {summary['seed']}",
        highlight=False,
    )
    for columns in (MAIN, MORE):
        console.print(_table(columns, summary["variants"]))
    for line in lines(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
