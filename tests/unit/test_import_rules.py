"""Who may import whom, read off the syntax trees, and what must never load torch.

The tables below are the rules; docs/architecture.md shows the same. Imports under
TYPE_CHECKING count, and so does `importlib.import_module("literal")`.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tiny_vllm

PACKAGE = Path(tiny_vllm.__file__).parent

BASE = frozenset(
    "config env errors gguf_header hub logger outputs protocol request sampling_params".split()
    + ["cache_report", "validation"]
)

# part -> parts it may import, besides itself and the base modules
ALLOWED: dict[str, frozenset[str]] = {
    part: frozenset(names.split())
    for part, names in {
        "metrics": "",
        "core": "metrics",
        "tokenizer": "",
        "ops": "",
        "distributed": "",
        "attention": "ops layers",  # for the protocol that a layer calls; never the other way
        "logits": "",
        "sampler": "logits ops",
        "layers": "ops distributed",
        "models": "layers ops distributed weights",
        "weights": "distributed",
        "worker": "models weights attention sampler distributed layers.decoder_layer ops",
        "origin": "ops.memory models weights sampler tokenizer layers.decoder_layer",
        "engine": "core worker distributed tokenizer metrics",
        "analyze": "core metrics bench.trace",
        "bench": "metrics",
        "server": "engine tokenizer metrics",
        "cli": "",
        "__main__": "cli",
        "__init__": "",
    }.items()
}

# part -> parts it may import inside functions only, or under TYPE_CHECKING
LAZY: dict[str, frozenset[str]] = {
    "__init__": frozenset({"engine"}),
    "bench": frozenset(
        "core engine origin tokenizer ops attention models weights sampler logits".split()
    ),
    "cli": frozenset(ALLOWED),
}

# the data plane; everything else is free of torch when imported
TORCH = frozenset(
    "ops distributed attention logits sampler layers models weights worker origin".split()
)
# the two bench modules that measure a device; a run's own process imports them
TORCH_MODULES = frozenset(
    f"tiny_vllm.bench.{name}"
    for name in (
        "device peaks kernel_forest kernel_layers kernel_run kernel_samplers kernel_timing"
    ).split()
)
TORCH_LAZY = frozenset({"bench", "cli", "engine"})
NUMPY = TORCH | {"bench", "engine"}
# base modules need the standard library only, but for these, inside functions
BASE_LAZY = {"hub": frozenset({"huggingface_hub"})}


@dataclass(frozen=True)
class Import:
    """One import: where it stands, what it names, whether it runs when the module is imported."""

    line: int
    target: str  # "torch.nn" or "tiny_vllm.core.block_pool"
    lazy: bool


def part_of(module: str) -> str:
    """The row of the tables that a module of the package belongs to."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def _names(node: ast.AST, module: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = module.split(".")[: -node.level]
            base = ".".join([*parents, base] if base else parents)
        # `from tiny_vllm import core` names a part; a public name stays the package itself
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from (str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant))


def imports(tree: ast.AST, module: str, lazy: bool = False) -> Iterator[Import]:
    """All imports of a module, in source order."""
    for node in ast.iter_child_nodes(tree):
        for name in _names(node, module):
            yield Import(node.lineno, name, lazy)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        yield from imports(node, module, lazy or is_function or is_typing)


def _third_party_fault(module: str, found: Import) -> str | None:
    part = part_of(module)
    library = found.target.split(".")[0]
    torch_ok = part in TORCH or module in TORCH_MODULES or (found.lazy and part in TORCH_LAZY)
    if library in ("torch", "triton") and not torch_ok:
        return f"{part} must not import {library}"
    if library == "numpy" and part not in NUMPY and not (found.lazy and part == "cli"):
        return f"{part} must not import numpy"
    optional = found.lazy and library in BASE_LAZY.get(part, ())
    if part in BASE and library not in sys.stdlib_module_names and not optional:
        return f"base module {part} must import the standard library only, not {library}"
    return None


def _internal_fault(module: str, found: Import) -> str | None:
    part = part_of(module)
    names = found.target.split(".")
    target = names[1] if len(names) > 1 else "__init__"
    if target in BASE or target == part:
        return None
    if target == "__init__" or target not in ALLOWED:  # the package root or a public name of it
        return None if part in ("cli", "bench") else f"{part} must not import the package root"
    if part in BASE:
        return f"base module {part} must not import {target}"
    exact = ".".join(names[1:3])
    if {target, exact} & ALLOWED[part]:
        return None
    if found.lazy and target in LAZY.get(part, ()):
        return None
    return f"{part} must not import {target}"


def faults(source: str, module: str) -> list[str]:
    """The broken rules of one module, each with its line."""
    found_faults = []
    for found in imports(ast.parse(source), module):
        internal = found.target.split(".")[0] == "tiny_vllm"
        fault = (_internal_fault if internal else _third_party_fault)(module, found)
        if fault:
            found_faults.append(f"{module}:{found.line}: {fault} ({found.target})")
    return found_faults


def module_name(path: Path) -> str:
    """Dotted name of a file; a package's own file ends in __init__."""
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(relative.parts)


SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_every_part_has_a_row() -> None:
    parts = {part_of(module_name(path)) for path in SOURCES}
    assert parts <= BASE | set(ALLOWED)
    assert {"core", "config", "__init__", "cli"} <= parts


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_follow_the_table(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8"), module_name(path)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tiny_vllm.core.x", "import torch"),
        ("tiny_vllm.core.x", "from tiny_vllm.worker import model_runner"),
        ("tiny_vllm.core.x", "from tiny_vllm import worker"),
        ("tiny_vllm.core.x", "from ..worker import input_batch"),
        ("tiny_vllm.core.x", "def f():\n    import torch"),
        ("tiny_vllm.worker.x", "from tiny_vllm.core.scheduler import Scheduler"),
        ("tiny_vllm.origin.x", "from tiny_vllm.engine import engine_core"),
        ("tiny_vllm.engine.x", "import torch"),
        ("tiny_vllm.bench.x", "from tiny_vllm.engine import llm"),
        ("tiny_vllm.analyze.x", "from tiny_vllm.bench.runner import run"),
        ("tiny_vllm.metrics.x", "if TYPE_CHECKING:\n    from tiny_vllm.core import scheduler"),
        ("tiny_vllm.config", "import numpy"),
        ("tiny_vllm.errors", "from tiny_vllm.core import scheduler"),
        ("tiny_vllm.cli.x", "import torch"),
        ("tiny_vllm.cli.x", "from tiny_vllm.bench import runner"),
        ("tiny_vllm.core.x", "import importlib\nimportlib.import_module('tiny_vllm.worker')"),
        ("tiny_vllm.engine.x", "from tiny_vllm import LLM"),
    ],
)
def test_a_broken_rule_is_found(module: str, source: str) -> None:
    assert len(faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tiny_vllm.core.x", "from . import block_pool\nfrom tiny_vllm.metrics import ledger"),
        ("tiny_vllm.core.x", "from tiny_vllm.request import Request"),
        ("tiny_vllm.bench.x", "def build():\n    from tiny_vllm.engine import engine_core"),
        ("tiny_vllm.analyze.x", "from tiny_vllm.bench.trace import read_trace"),
        ("tiny_vllm.cli.x", "def run():\n    import torch\n    from tiny_vllm.bench import runner"),
        ("tiny_vllm.worker.x", "import torch\nfrom tiny_vllm.models import registry"),
    ],
)
def test_what_the_table_allows_passes(module: str, source: str) -> None:
    assert faults(source, module) == []


def _loaded(module: str) -> list[str]:
    code = (
        f"import sys, {module}\n"
        "print(*[n for n in ('torch', 'triton', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    return done.stdout.split()


def _torch_free_modules() -> list[str]:
    parts = ("core", "metrics", "analyze", "cli")
    files = [path for part in parts for path in sorted((PACKAGE / part).rglob("*.py"))]
    return [module_name(path).removesuffix(".__init__") for path in files]


def test_control_plane_loads_no_torch() -> None:
    """All modules of core, metrics, analyze and cli in one process, and the package itself."""
    assert _loaded(", ".join(["tiny_vllm", *_torch_free_modules()])) == []


def test_the_probe_sees_torch() -> None:
    """The test above would pass emptily if the probe could not see torch."""
    assert "torch" in _loaded("torch")
