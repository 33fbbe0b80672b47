"""An example that people read must not show a wrong answer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_vllm

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.real_model


def test_the_questions_on_one_document_are_answered_rightly() -> None:
    """Its old document was too hard for the small model: room 7 "has 10 seats", of 21."""
    environ = {**os.environ, "PYTHONPATH": str(Path(tiny_vllm.__file__).parents[1])}
    command = [sys.executable, str(EXAMPLES / "shared_prefix.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for answer, right in zip(
        lines[1::2], ("Biscuit", "31 met", "four coins", "20 miles"), strict=True
    ):
        assert right in answer
    cached = [int(re.search(r"\[(\d+) of", line)[1]) for line in lines[2::2]]
    assert cached == [176, 177, 176]  # to the token where the questions part, not to the block
