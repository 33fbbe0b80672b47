"""`make` sets up what was asked for, or stops; nothing is installed here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or not (ROOT / "Makefile").exists(), reason="needs make"
)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A finished environment made from another interpreter, newer than what it depends on."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text("#!/bin/sh\necho Python 3.11.0 in /elsewhere\n")
    python.chmod(0o755)
    (folder / ".ready").touch()
    os.utime(folder / ".ready", (4e9, 4e9))
    return folder


def make(venv: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    # These tests may themselves run under make, whose variables they must not inherit.
    outer = ("PYTHON", "PY", "VENV", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    environ = {k: v for k, v in os.environ.items() if k not in outer}
    return subprocess.run(
        ["make", *arguments, f"VENV={venv}"], cwd=ROOT, env=environ, capture_output=True, text=True
    )


@pytest.mark.parametrize("target", ["bench", "setup", "test"])
def test_an_environment_of_another_interpreter_stops_make(venv: Path, target: str) -> None:
    """PYTHON=other used to be ignored when .venv was there already."""
    done = make(venv, target, f"PYTHON={sys.executable}")
    assert done.returncode == 2
    assert f"{venv} was made from Python 3.11.0 in /elsewhere" in done.stderr
    assert "run make clean first" in done.stderr
    assert done.stdout == ""


def test_the_same_interpreter_goes_on_and_setup_says_how_to_use_it(venv: Path) -> None:
    for arguments in (["setup"], ["setup", f"PYTHON={venv}/bin/python"]):
        done = make(venv, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"ready: type '. {venv}/bin/activate', then 'tiny-vllm --help'\n"


def test_an_environment_of_ones_own_needs_no_set_up(venv: Path) -> None:
    done = make(venv, "setup", "PY=python3")
    assert done.returncode == 0
    assert "ready" not in done.stdout
