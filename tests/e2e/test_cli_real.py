"""The commands on the real small model."""

import io
import json
import sys

import pytest

from tiny_vllm.cli.main import main

pytestmark = pytest.mark.real_model

SMALL = ["--max-model-len", "512", "--block-size", "16", "--dtype", "float32"]


def test_generate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "The capital of France is"
    assert main(["generate", prompt, prompt, "--json", "--max-tokens", "4", *SMALL]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["outputs"][0]["text"].startswith(" Paris")
    assert first["outputs"] == second["outputs"]
    assert (first["generated_tokens"], first["outputs"][0]["finish_reason"]) == (4, "length")


def test_a_prompt_too_long_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["The capital of France is", "word " * 600, "Two and two make"]
    assert (
        main(["generate", *prompts, "--json", "--max-tokens", "2", "--logprobs", "1", *SMALL]) == 1
    )
    out, err = capsys.readouterr()
    first, second, third = (json.loads(line) for line in out.splitlines())
    assert first["outputs"][0]["logprobs"][0][0]["token"] == " Paris"
    assert "--max-model-len=512" in second["error"]
    assert "error: prompt 2 of 3: the prompt has 601 tokens" in err
    assert third["generated_tokens"] == 2


def test_streamed_text_is_the_batch_text(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "Once upon a time", "--max-tokens", "12", *SMALL]
    assert main(argv) == 0
    streamed = capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert streamed == record["outputs"][0]["text"] + "\n"


def test_each_chat_turn_finds_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Name a colour.\nName another one.\n"))
    assert main(["chat", "--max-tokens", "8", *SMALL]) == 0
    first, second = (
        line for line in capsys.readouterr().err.splitlines() if "prompt tokens" in line
    )
    assert ", 0 of them cached" in first
    cached = int(second.split(", ")[1].split()[0])
    assert cached >= 32  # at least the template and the first question


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "-m", "smollm-135m"]) == 2
    assert "smollm-135m" in capsys.readouterr().err
