"""A whole benchmark: every variant and repeat in its own process, then files and summary.

Repeats are interleaved (ABAB). A variant that fails is reported and does not stop the
others; Ctrl-C, or a signal to end, stops the children and leaves a valid folder marked
`interrupted`.
"""

import datetime
import itertools
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_vllm.bench.driver import check_lengths
from tiny_vllm.bench.folder import RunFolder, check_free, load_run
from tiny_vllm.bench.limits import attach_peaks
from tiny_vllm.bench.manifest import origin_of_run
from tiny_vllm.bench.plots import draw_comparison
from tiny_vllm.bench.progress import Figures, Reporter, make_reporter
from tiny_vllm.bench.records import RunResult
from tiny_vllm.bench.results import summarize
from tiny_vllm.bench.trace import trace_sha256
from tiny_vllm.bench.variants import FACTORIES, Variant
from tiny_vllm.bench.worker import ChildFailed, RunSpec, run_child, run_variant
from tiny_vllm.bench.workloads import EncoderFactory, Workload, build_workload
from tiny_vllm.config import EngineConfig
from tiny_vllm.env import Switches, setting_notes
from tiny_vllm.errors import ConfigError, RequestTooLongError, TraceError

DEFAULT_MAX_NUM_SEQS = 16
LENGTH_STEP = 64  # max_model_len is rounded up to it
BAD_INPUT = ("ConfigError", "ModelLoadError", "TraceError", "InvalidRequestError")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a workload must know of the model."""

    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What the caller asked for. ``engine`` holds EngineConfig keys from flags and switches.

    ``arrivals`` is `all`, `recorded`, or None: recorded when the trace has them.
    """

    workload: str = "demo"
    variants: tuple[Variant, ...] = (Variant("origin", "origin"), Variant("extended"))
    engine: Mapping[str, Any] = field(default_factory=dict)
    switches: Switches = field(default_factory=Switches)
    repeats: int = 1
    seed: int = 0
    scale: float = 1.0
    arrivals: str | None = None
    out: Path | None = None
    force: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats} must be at least 1")
        if self.arrivals not in (None, "all", "recorded"):
            raise ConfigError(f"arrivals={self.arrivals!r} is not one of all, recorded")
        for variant in self.variants:
            variant.config(self.engine)  # bad settings are found before anything is loaded

    @property
    def model(self) -> str:
        return str(self.engine.get("model", EngineConfig().model))


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Summary, run folder and exit status: 0 good, 1 a variant failed, 2 bad input."""

    summary: dict[str, Any]
    folder: Path
    exit_code: int


def run_bench(options: BenchOptions, shape: ModelShape, encoder: EncoderFactory) -> BenchResult:
    """Run the benchmark and write its folder.

    Raises:
        ConfigError, TraceError: bad input, before anything was run.
    """
    if options.out and not options.force:
        check_free(options.out)
    workload = build_workload(
        options.workload,
        shape.vocab_size,
        encoder,
        seed=options.seed,
        scale=options.scale,
        switches=options.switches,
    )
    plan = _Plan.make(options, shape, workload)
    plan.check_that_something_fits()
    out = options.out or _default_folder(workload.name)
    with _end_signals_as_ctrl_c():
        folder = RunFolder.create(out, plan.manifest())
        with make_reporter(options.quiet) as reporter:
            status = _Session(plan, folder, reporter).run()
        folder.finish(status)
    return _conclude(folder, status)


@contextmanager
def _end_signals_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, unless the caller handles them itself."""
    kinds = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]
    in_main = threading.current_thread() is threading.main_thread()
    taken = [k for k in kinds if k and in_main and signal.getsignal(k) is signal.SIG_DFL]
    for kind in taken:
        signal.signal(kind, signal.default_int_handler)
    try:
        yield
    finally:
        for kind in taken:
            signal.signal(kind, signal.SIG_DFL)


def _default_folder(workload: str) -> Path:
    """A new folder under runs/; two runs may start in one second."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    folders = (Path("runs") / f"{stamp}-{workload}{name}" for name in names)
    return next(folder for folder in folders if not folder.exists())


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that is decided before the first run."""

    options: BenchOptions
    workload: Workload
    configs: Mapping[str, EngineConfig]
    use_arrivals: bool
    reasons: Mapping[str, str]
    notes: tuple[str, ...]

    @classmethod
    def make(cls, options: BenchOptions, shape: ModelShape, workload: Workload) -> "_Plan":
        recorded = any(r.arrival is not None for r in workload.requests)
        if options.arrivals == "recorded" and not recorded:
            raise TraceError(
                f"--arrivals recorded: no request of {workload.name} has a field 'arrival'"
            )
        base, reasons = _base_settings(options, shape, workload)
        return cls(
            options,
            workload,
            {v.name: v.config(base) for v in options.variants},
            recorded and options.arrivals != "all",
            reasons,
            (*workload.notes, *_switch_notes(options, shape)),
        )

    def check_that_something_fits(self) -> None:
        """Raise ConfigError, before anything is loaded, when every request would be refused."""
        first: RequestTooLongError | None = None
        prompt_limit = self.options.switches.max_prompt_len
        lengths = [config.max_model_len or sys.maxsize for config in self.configs.values()]
        for request in self.workload.requests:
            try:
                check_lengths(request, prompt_limit, max(lengths))
            except RequestTooLongError as error:
                first = first or error
            else:
                return
        raise ConfigError(f"no request of {self.workload.name} can run: {first}") from first

    def manifest(self) -> dict[str, Any]:
        options, workload = self.options, self.workload
        return {
            **origin_of_run(),
            "workload": workload.name,
            "model": options.model,
            "seed": options.seed,
            "scale": options.scale,
            "repeats": options.repeats,
            "arrivals": "recorded" if self.use_arrivals else "all",
            "cache_at_start": "cold",
            "is_random": workload.is_random,
            "num_requests": len(workload.requests),
            "trace_sha256": trace_sha256(workload.requests),
            "engine": next(iter(self.configs.values())).to_dict(),
            "reasons": dict(self.reasons),
            "variants": [
                {"name": v.name, "engine": v.engine, "config": self.configs[v.name].to_dict()}
                for v in options.variants
            ],
            "switches": {
                name: getattr(options.switches, name) for name in Switches.__dataclass_fields__
            },
            "notes": list(self.notes),
        }

    def spec(self, variant: Variant) -> RunSpec:
        return RunSpec(
            factory=FACTORIES[variant.engine],
            config=self.configs[variant.name],
            requests=self.workload.requests,
            use_arrivals=self.use_arrivals,
            max_prompt_len=self.options.switches.max_prompt_len,
        )


def _base_settings(
    options: BenchOptions, shape: ModelShape, workload: Workload
) -> tuple[dict[str, Any], dict[str, str]]:
    """EngineConfig keys that all variants share, and the reason of each chosen here."""
    base = {**options.engine, "skip_tokenizer_init": True}
    reasons = {"skip_tokenizer_init": "the trace is token ids"}
    longest = -(-workload.longest // LENGTH_STEP) * LENGTH_STEP
    if "max_model_len" not in base:
        base["max_model_len"] = longest
        reasons["max_model_len"] = f"longest request of the trace, rounded up to {LENGTH_STEP}"
    if base["max_model_len"] > shape.max_model_len:
        reasons["max_model_len"] = f"the model's limit; {base['max_model_len']} was wanted"
        base["max_model_len"] = shape.max_model_len
    if "max_num_seqs" not in base:
        base["max_num_seqs"] = min(len(workload.requests), DEFAULT_MAX_NUM_SEQS)
        reasons["max_num_seqs"] = (
            f"number of requests, at most {DEFAULT_MAX_NUM_SEQS}; equal for all variants"
        )
    return base, reasons


def _switch_notes(options: BenchOptions, shape: ModelShape) -> list[str]:
    asked = options.switches.max_seq_len
    if asked is None or asked <= shape.max_model_len:
        return []
    return [f"MAX_SEQ_LEN={asked} is above the model's limit; {shape.max_model_len} is used"]


@dataclass(slots=True)
class _Session:
    """The loop over repeats and variants."""

    plan: _Plan
    folder: RunFolder
    reporter: Reporter
    failed: set[str] = field(default_factory=set)

    def run(self) -> str:
        """Run everything; returns the status for the manifest."""
        try:
            for repeat in range(self.plan.options.repeats):
                for variant in self.plan.options.variants:
                    if variant.name not in self.failed:
                        self._run_one(variant, repeat)
            attach_peaks(self.folder, self.reporter)
        except KeyboardInterrupt:
            return "interrupted"
        return "failed" if self.failed else "complete"

    def _run_one(self, variant: Variant, repeat: int) -> None:
        workload = self.plan.workload
        self.reporter.start(
            f"{variant.name} {repeat + 1}/{self.plan.options.repeats}",
            sum(request.max_tokens for request in workload.requests),
        )
        try:
            result = run_child(run_variant, self.plan.spec(variant), on_event=self.reporter.event)
        except ChildFailed as error:
            self.failed.add(variant.name)
            self.folder.add_failure(variant.name, repeat, error.kind, str(error))
            self.reporter.end("failed")
            return
        self._note_switches(variant, result)
        self.folder.add_run(variant.name, repeat, result)
        tokens = sum(len(r.output_token_ids) for r in result.requests if not r.failed)
        self.reporter.end("done", Figures(tokens, result.wall_s))

    def _note_switches(self, variant: Variant, result: RunResult) -> None:
        """Report each switch or change that this run could not obey, once."""
        notes = self.folder.manifest["notes"]
        info, asked = result.info, self.plan.configs[variant.name]
        on_cpu = not info.device.startswith("cuda")
        used = {} if variant.engine == "origin" else {**info.config}
        settings = self.plan.options.engine
        found = setting_notes({**settings, **variant.changes}, info.device, used)
        if on_cpu and variant.changes.get("use_cuda_graph") is False:
            found.append(
                f"use_cuda_graph={asked.use_cuda_graph} of variant {variant.name!r} has no "
                f"effect on {result.info.device}: CUDA graphs need a GPU"
            )
        if variant.engine == "origin":
            found += _switches_without_origin(self.plan.options.switches, on_cpu)
        notes += [note for note in found if note not in notes]


def _switches_without_origin(switches: Switches, on_cpu: bool) -> list[str]:
    """The set switches that the baseline has no use for."""
    set_ones = {
        "USE_PREFIX_CACHE": switches.use_prefix_cache,
        "CHUNKED_PREFILL": switches.chunked_prefill,
        "BLOCK_SIZE": switches.block_size,
        "USE_CUDA_GRAPH": None if on_cpu else switches.use_cuda_graph,  # said for all engines
    }
    return [
        f"{name}={int(value)} has no effect on the baseline: it has no such mechanism"
        for name, value in set_ones.items()
        if value is not None
    ]


def _conclude(folder: RunFolder, status: str) -> BenchResult:
    """Summary and plot from the files, and the exit status."""
    data = load_run(folder.path)
    summary = summarize(data)
    folder.write_summary(summary)
    if any(not v.get("error") for v in summary["variants"]):
        try:
            draw_comparison(summary, data, folder.path)
        except ImportError:
            summary["notes"].append("no comparison.png: matplotlib is not installed")
            folder.write_summary(summary)
    return BenchResult(summary, folder.path, _exit_code(summary, folder.manifest, status))


def _exit_code(summary: Mapping[str, Any], manifest: Mapping[str, Any], status: str) -> int:
    if status == "interrupted":
        return 130
    kinds = [run.get("error_kind") for run in manifest["runs"]]
    if kinds and all(kind in BAD_INPUT for kind in kinds):
        return 2
    nothing_ran = any(v["failed"] == v["requests"] for v in summary["variants"])
    return 1 if status == "failed" or nothing_ran else 0
