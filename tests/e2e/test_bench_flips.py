"""Answers that part after a cache hit are found, with the gap at which they did."""

import json
import sys

import pytest

from tiny_vllm.bench import flips
from tiny_vllm.outputs import CompletionOutput, Logprob, RequestOutput


def answer(token_ids, gaps=None):
    logprobs = None
    if gaps is not None:
        logprobs = [{1: Logprob(-0.5, 1), 2: Logprob(-0.5 - gap, 2)} for gap in gaps]
    output = CompletionOutput(0, "", token_ids)
    output.logprobs = logprobs
    return RequestOutput("r", "a prompt", [1], [output], True)


def test_the_first_difference_and_its_gap():
    cold = answer([1, 1, 1, 1], [3.0, 0.25, 0.5, 1.0])
    assert flips.first_flip(cold, answer([1, 1, 1, 1])) is None
    assert flips.first_flip(cold, answer([1, 1, 2, 2])) == flips.Flip("a prompt", 2, 0.5)


@pytest.mark.real_model
def test_float32_answers_do_not_part(tmp_path, capsys, monkeypatch):
    path = tmp_path / "flips.json"
    arguments = ["--dtype", "float32", "--tokens", "4", "--prompts", "3", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", ["flips", *arguments])
    flips.main()
    result = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    for way in result["ways"].values():
        assert way["answers"] == 3 and way["flips"] == [] and way["cached_tokens"] > 0
