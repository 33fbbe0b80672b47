"""`tiny-vllm explain`: why prompts did or did not hit the prefix cache, from a run folder."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiny_vllm.errors import ConfigError, TinyVllmError

if TYPE_CHECKING:
    from tiny_vllm.bench.folder import RunData
    from tiny_vllm.bench.misses import ExplainedRequest

BAR_WIDTH = 40
RUNS = Path("runs")


def explain(
    folder: Annotated[
        Path | None, typer.Argument(help="Run folder of bench. Default: the newest under runs/.")
    ] = None,
    request: Annotated[
        str | None, typer.Option("--request", "-r", help="Only the request of this id.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Variant of the run. Default: the first that has reports.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=0, help="Which of the repeats.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON line a request, and one with the totals.")
    ] = False,
) -> None:
    """Say for each request which prompt tokens were cached, and why the others were not.

    Every prompt token is either found or has one reason: cold, evicted (when, and for whom),
    diverged (at which token, from which request), below_block, pending, last_token, salt,
    disabled.
    """
    from tiny_vllm.bench.folder import load_run
    from tiny_vllm.bench.misses import (
        explained,
        to_json,
        totals,
        variants_with_reports,
        with_text,
    )

    path = folder or newest_run()
    data = load_run(path)
    names = variants_with_reports(data)
    if variant is None and not names:
        raise ConfigError(f"no variant of {path} has a prefix cache: there is nothing to explain")
    name = variant or names[0]
    requests = with_text(explained(data, name, request, repeat), token_texts(data))
    if as_json:
        for one in requests:
            typer.echo(json.dumps(to_json(one)))
        typer.echo(json.dumps({"variant": name, "tokens": totals(requests)}))
        return
    typer.echo(f"{path}, variant {name}: {len(requests)} request{'s'[: len(requests) != 1]}")
    for one in requests:
        typer.echo(_line(one))
    _print_totals(totals(requests))


def newest_run(root: Path = RUNS) -> Path:
    """The folder under ``root`` whose manifest is the newest.

    Raises:
        ConfigError: there is none.
    """
    found = sorted(root.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(
            f"no run folder under {root}/; run tiny-vllm bench, or name the folder of a run"
        )
    return found[-1].parent


def token_texts(data: "RunData") -> Callable[[int], str] | None:
    """Texts of the model's tokens; None where it has no tokenizer, or none is installed."""
    from tiny_vllm.bench.encoder import ModelEncoder

    engine = data.manifest["engine"]
    try:
        names = engine.get("tokenizer"), engine.get("revision")
        return ModelEncoder.load(data.manifest["model"], *names).token_text
    except (TinyVllmError, ImportError) as error:
        typer.echo(f"tokens are shown as ids: {error}", err=True)
        return None


def _line(one: "ExplainedRequest") -> str:
    text = "no prefix cache" if one.report is None else one.report.describe()
    return f"request {one.request_id} ({one.prompt_tokens} tokens): {text}"


def _print_totals(counts: Mapping[str, int]) -> None:
    total = sum(counts.values())
    if not total:
        return
    typer.echo(f"prompt tokens: {total}")
    for name, count in counts.items():
        if count:
            bar = "#" * max(1, round(BAR_WIDTH * count / total))
            typer.echo(f"  {name:<12}{count:>9} {100 * count / total:6.1f} %  {bar}")
