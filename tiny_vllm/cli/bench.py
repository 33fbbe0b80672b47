"""`tiny-vllm bench`: one trace through each variant; tables for people, one JSON line last."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiny_vllm.cli.options import ENGINE, engine_settings, with_flags
from tiny_vllm.env import Switches

if TYPE_CHECKING:
    from tiny_vllm.bench.session import BenchOptions, ModelShape
    from tiny_vllm.bench.workloads import PromptEncoder

WORKLOAD_HELP = (
    "seed, single, prefill-1x8k, prefill-1x32k, cold-64x2k, shared-BxPk (as in shared-16x1.5k), "
    "forest, demo, or a JSONL trace file."
)
VARIANTS_HELP = (
    "Comma-separated: origin, extended, no-prefix-cache, no-chunked-prefill, no-cuda-graph, "
    "per-request-attention, or one of your own as name=key:value,key:value (keys are engine "
    "settings, and engine:origin); may be repeated, ';' also separates."
)


@with_flags(ENGINE)
def bench(
    engine: dict[str, Any],
    workload: Annotated[str, typer.Option("--workload", "-w", help=WORKLOAD_HELP)] = "demo",
    variants: Annotated[list[str] | None, typer.Option(help=VARIANTS_HELP)] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per variant, interleaved.")] = 1,
    seed: Annotated[int, typer.Option(help="Draws the token ids of the workload.")] = 0,
    scale: Annotated[
        float, typer.Option(help="Shrinks all lengths of a built-in workload: 0 < F <= 1.")
    ] = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Output cap per request; 0 = no cap: the lengths of the trace."),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(help="all: everything at once; recorded: as the trace says, if it does."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder. Default: runs/<time>-<workload>.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the results in the --out folder.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Run one trace through several variants of the engine and compare them.

    Every run has a fresh process, a warm-up outside the clock and a cold prefix cache. The
    run folder keeps every request, step and setting; the last line of stdout is its summary
    as JSON. Exit status 1: a variant failed, or could run no request.
    """
    from tiny_vllm.bench.session import BenchOptions, run_bench
    from tiny_vllm.bench.table import print_summary
    from tiny_vllm.bench.variants import parse_variants

    switches = _overridden(Switches.read(), engine, max_new_tokens)
    options = BenchOptions(
        workload=workload,
        variants=parse_variants(variants or ["origin,extended"]),
        engine=engine_settings(engine, switches),
        switches=switches,
        repeats=repeats,
        seed=seed,
        scale=scale,
        arrivals=arrivals,
        out=out,
        force=force,
        quiet=quiet,
    )
    result = run_bench(options, model_shape(options), encoder_factory(options))
    print_summary(result.summary)
    typer.echo(f"run folder: {result.folder}")
    sys.stdout.write(json.dumps(result.summary, separators=(",", ":")) + "\n")
    sys.stdout.flush()
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _overridden(switches: Switches, engine: dict[str, Any], max_new_tokens: int | None) -> Switches:
    """Switches with those replaced that a flag overrides, so that notes and caps are true."""
    import dataclasses

    changes: dict[str, Any] = {
        "use_prefix_cache": engine.get("enable_prefix_caching"),
        "chunked_prefill": engine.get("enable_chunked_prefill"),
        "use_cuda_graph": engine.get("use_cuda_graph"),
        "batch_size": engine.get("max_num_seqs"),
        "max_seq_len": engine.get("max_model_len"),
        "block_size": engine.get("block_size"),
        "max_new_tokens_generated": max_new_tokens,
    }
    given = {key: value for key, value in changes.items() if value is not None}
    return dataclasses.replace(switches, **given)


def model_shape(options: "BenchOptions") -> "ModelShape":
    """Vocabulary and longest context of the model, from its config alone.

    Raises:
        ModelLoadError: no such model.
    """
    from tiny_vllm.bench.session import ModelShape
    from tiny_vllm.config import EngineConfig
    from tiny_vllm.hub import resolve_model
    from tiny_vllm.models.registry import parse_model_config
    from tiny_vllm.weights import read_config

    config = EngineConfig.create(**options.engine)
    files = resolve_model(config.model, config.revision)
    model = parse_model_config(read_config(files, config.load_format))
    return ModelShape(model.vocab_size, model.max_position_embeddings)


def encoder_factory(options: "BenchOptions") -> "Callable[[], PromptEncoder]":
    """Loads the model's tokenizer when a prompt is text."""

    def load() -> "PromptEncoder":
        from tiny_vllm.bench.encoder import ModelEncoder

        settings = options.engine
        return ModelEncoder.load(options.model, settings.get("tokenizer"), settings.get("revision"))

    return load
