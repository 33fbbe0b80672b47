"""The command line without a model: help, flags, switches, errors, streams.

`FakeLLM` answers with the words of the prompt, so that what is printed can be checked.
"""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import tiny_vllm
from tiny_vllm.cli import main as cli
from tiny_vllm.cli.environment import collect
from tiny_vllm.cli.options import engine_settings, sampling_params
from tiny_vllm.env import Switches
from tiny_vllm.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    RequestTooLongError,
    TinyVllmError,
    TraceError,
)
from tiny_vllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from tiny_vllm.sampling_params import SamplingParams


class FakeLLM:
    """Answers "w1 w2 ..." with the words of the last message, one at a time."""

    made: ClassVar[list["FakeLLM"]] = []
    interrupt_after: ClassVar[int | None] = None
    error: ClassVar[str | None] = None

    def __init__(self, **config: Any) -> None:
        self.config = config
        self.engine = SimpleNamespace(info=SimpleNamespace(device="cpu"))
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.closed_streams = 0
        self.is_shut_down = False
        FakeLLM.made.append(self)

    def encode(self, prompt: Any) -> tuple[str, list[int]]:
        text = prompt if isinstance(prompt, str) else " ".join(m["content"] for m in prompt)
        return text, list(range(len(text.split())))

    def _output(self, prompt: Any, words: list[str], n: int, finished: bool) -> RequestOutput:
        text, ids = self.encode(prompt)
        outputs = [CompletionOutput(i, " ".join(words), list(range(len(words)))) for i in range(n)]
        if finished:
            for completion in outputs:
                completion.finish_reason = FinishReason.STOP
        metrics = RequestMetrics(10.0, first_token_time=10.5, finished_time=12.0)
        return RequestOutput(
            "0", text, ids, outputs, finished, len(ids) - 1, metrics=metrics, error=self.error
        )

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append((prompt, params))
        words = (prompt if isinstance(prompt, str) else prompt[-1]["content"]).split()
        try:
            for count in range(1, len(words) + 1):
                if self.interrupt_after == count - 1:
                    raise KeyboardInterrupt
                yield self._output(prompt, words[:count], 1, count == len(words))
        finally:
            self.closed_streams += 1

    def generate(
        self, prompts: list[Any], params: SamplingParams, use_progress: bool
    ) -> list[RequestOutput]:
        self.asked.append((prompts, params))
        return [self._output(p, self.encode(p)[0].split(), params.n, True) for p in prompts]

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture(autouse=True)
def _fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_vllm.__dict__, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeLLM, "interrupt_after", None)
    monkeypatch.setattr(FakeLLM, "error", None)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# --- help and version


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_loads_no_torch(command: str) -> None:
    code = (
        "import sys\nfrom tiny_vllm.cli.main import main\n"
        f"status = main({[*command.split(), '--help']!r})\n"
        "assert status == 0, status\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"Usage: tiny-vllm {command}".rstrip() in done.stdout
    wanted = list(cli.COMMANDS) if not command else ["--model", "--device"]
    assert all(word in done.stdout for word in wanted) or command == "env"


def test_only_the_called_command_is_imported() -> None:
    code = (
        "import sys\nfrom tiny_vllm.cli.main import main\nmain(['env', '--help'])\n"
        "print('tiny_vllm.cli.generate' in sys.modules, 'tiny_vllm.cli.bench' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_module_and_version() -> None:
    command = [sys.executable, "-m", "tiny_vllm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"tiny-vllm-extend {tiny_vllm.__version__}"


def test_unknown_command_and_flag_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generat", "x"]) == 2
    assert "generat" in capsys.readouterr().err
    assert cli.main(["env", "--nope"]) == 2
    assert "--nope" in capsys.readouterr().err


def test_origin_is_bench_with_one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda argv: called.append(argv) or 0)
    monkeypatch.setattr(sys, "argv", ["tiny-vllm-origin", "--seed", "3"])
    assert cli.origin_main() == 0
    assert called == [["bench", "--variants", "origin", "--seed", "3"]]


# --- errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("bad\nvalue"), 2),
        (InvalidRequestError("bad value", "n"), 2),
        (RequestTooLongError("bad value"), 2),
        (TraceError("bad value"), 2),
        (ModelLoadError("bad value"), 2),
        (EngineDeadError("bad value"), 1),
        (TinyVllmError("bad value"), 1),
        (OSError("bad value"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line_and_a_status(
    error: BaseException,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**config: Any) -> None:
        raise error

    monkeypatch.setitem(tiny_vllm.__dict__, "LLM", fail)
    assert cli.main(["generate", "hello"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip() == ("interrupted" if status == 130 else "error: bad value")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--top-k", "-3"], "top_k=-3"),
        (["--logit-bias", "x=1"], "--logit-bias 'x=1'"),
        (["--min-tokens", "9", "--max-tokens", "8"], "min_tokens=9 is above max_tokens=8"),
    ],
)
def test_bad_sampling_flags(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hello", *argv]) == 2
    assert part in capsys.readouterr().err
    assert FakeLLM.made == []  # refused before the model is loaded


@pytest.mark.parametrize("command", ["generate", "chat", "env"])
def test_every_command_refuses_a_nonsense_switch(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("USE_PREFIX_CACHE", "maybe")
    type_in(monkeypatch, "hello\n")
    assert cli.main([command]) == 2
    assert "USE_PREFIX_CACHE='maybe'" in capsys.readouterr().err


# --- flags and switches


def test_flags_reach_the_engine_and_the_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "-m some/model --no-enable-prefix-caching --block-size 16 --engine-seed 7"
    sampling = "--seed 3 --stop a --stop b --stop-token-ids 5 --logit-bias 4=-1.5 --top-p 0.5"
    assert cli.main(["generate", "hello", *flags.split(), *sampling.split()]) == 0
    (llm,) = FakeLLM.made
    assert llm.config == {
        "model": "some/model",
        "enable_prefix_caching": False,
        "block_size": 16,
        "seed": 7,
    }
    assert llm.asked[0][1] == SamplingParams(
        temperature=0.0,
        max_tokens=256,
        seed=3,
        stop=("a", "b"),
        stop_token_ids=(5,),
        logit_bias={4: -1.5},
        top_p=0.5,
    )


def test_switches_are_defaults_below_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"USE_PREFIX_CACHE": "0", "BLOCK_SIZE": "64", "MAX_SEQ_LEN": "99"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MAX_NEW_TOKENS_GENERATED", "5")
    assert cli.main(["generate", "hello", "--block-size", "32"]) == 0
    (llm,) = FakeLLM.made
    assert llm.config == {"enable_prefix_caching": False, "block_size": 32, "max_model_len": 99}
    assert llm.asked[0][1].max_tokens == 5
    assert cli.main(["generate", "hello", "--max-tokens", "6"]) == 0
    assert FakeLLM.made[1].asked[0][1].max_tokens == 6


def test_no_cap_means_no_max_tokens() -> None:
    assert sampling_params({}, Switches(max_new_tokens_generated=0)).max_tokens is None
    assert sampling_params({}, Switches()).max_tokens == 256
    assert engine_settings({}, Switches(batch_size=2)) == {"max_num_seqs": 2}


def test_a_switch_without_effect_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("USE_CUDA_GRAPH", "1")
    assert cli.main(["generate", "hello"]) == 0
    assert "USE_CUDA_GRAPH=1 has no effect on cpu" in capsys.readouterr().err


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_max_prompt_len_refuses_a_longer_prompt(
    extra: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAX_PROMPT_LEN", "2")
    assert cli.main(["generate", "one two three", *extra]) == 2
    assert "3 tokens, MAX_PROMPT_LEN=2" in capsys.readouterr().err
    assert FakeLLM.made[0].is_shut_down
    assert cli.main(["generate", "one two", *extra]) == 0


# --- generate


def test_generate_streams_text_to_stdout_and_numbers_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["generate", "to be or not"]) == 0
    out, err = capsys.readouterr()
    assert out == "to be or not\n"
    # 4 words in 2 s from arrival to end, the first after 0.5 s
    assert err.strip() == (
        "[4 prompt tokens, 3 of them cached; 4 generated; 2.0 tok/s; first token after 500 ms]"
    )
    assert FakeLLM.made[0].is_shut_down


def test_several_prompts_get_headers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "a b", "c"]) == 0
    assert capsys.readouterr().out == "=== prompt 1 of 2\na b\n=== prompt 2 of 2\nc\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [([], ["one\ntwo"]), (["--lines"], ["one", "two"])],
)
def test_prompts_from_stdin(
    argv: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "one\ntwo\n")
    assert cli.main(["generate", *argv]) == 0
    assert [prompt for prompt, _ in FakeLLM.made[0].asked] == expected


def test_an_empty_stdin_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "\n")
    assert cli.main(["generate"]) == 2
    assert "stdin is empty" in capsys.readouterr().err


def test_json_is_one_line_a_request_in_one_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "é b", "c", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["é b", "c"]
    assert lines[0] == {
        "request_id": "0",
        "prompt": "é b",
        "outputs": [{"text": "é b", "token_ids": [0, 1], "finish_reason": "stop"}],
        "error": None,
        "prompt_tokens": 2,
        "cached_tokens": 1,
        "generated_tokens": 2,
        "tokens_per_s": 1.0,
        "ttft_ms": 500.0,
    }
    assert len(FakeLLM.made[0].asked) == 1


def test_several_completions_are_all_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "a b", "--n", "2"]) == 0
    out = capsys.readouterr().out
    assert out == "--- completion 1\na b\n--- completion 2\na b\n"


def test_chat_template_gets_messages() -> None:
    assert cli.main(["generate", "hi", "--system", "be brief"]) == 0
    assert cli.main(["generate", "hi", "--chat"]) == 0
    user = {"role": "user", "content": "hi"}
    assert FakeLLM.made[0].asked[0][0] == [{"role": "system", "content": "be brief"}, user]
    assert FakeLLM.made[1].asked[0][0] == [user]


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_failed_request_is_reported_and_the_rest_go_on(
    extra: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLLM, "error", "the pool is too small")
    assert cli.main(["generate", "a", "b", *extra]) == 1
    assert capsys.readouterr().err.count("error: the pool is too small") == 2


def test_ctrl_c_in_generate_aborts_and_shuts_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLLM, "interrupt_after", 1)
    assert cli.main(["generate", "a b c"]) == 130
    assert capsys.readouterr().out == "a"
    assert (FakeLLM.made[0].closed_streams, FakeLLM.made[0].is_shut_down) == (1, True)


# --- chat


def chat_with(monkeypatch: pytest.MonkeyPatch, text: str, *argv: str) -> FakeLLM:
    type_in(monkeypatch, text)
    assert cli.main(["chat", *argv]) == 0
    return FakeLLM.made[-1]


def roles_and_text(messages: list[dict[str, str]]) -> list[str]:
    return [f"{m['role']}: {m['content']}" for m in messages]


def test_chat_keeps_the_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = chat_with(monkeypatch, "hello you\n\nbye now\n", "--system", "be kind")
    assert roles_and_text(llm.asked[1][0]) == [
        "system: be kind",
        "user: hello you",
        "assistant: hello you",
        "user: bye now",
    ]
    out, err = capsys.readouterr()
    assert out == "hello you\nbye now\n"
    assert "[4 prompt tokens, 3 of them cached" in err  # system 2 + user 2 words
    assert llm.is_shut_down


def test_chat_reset_and_exit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = chat_with(monkeypatch, "one\n/reset\ntwo\n/what\n/exit\nthree\n", "--system", "s")
    assert [roles_and_text(asked) for asked, _ in llm.asked] == [
        ["system: s", "user: one"],
        ["system: s", "user: two"],
    ]
    err = capsys.readouterr().err
    assert "unknown command /what" in err


def test_ctrl_c_in_chat_keeps_the_half_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLLM, "interrupt_after", 2)
    llm = chat_with(monkeypatch, "a b c d\nx\n")
    assert roles_and_text(llm.asked[1][0]) == ["user: a b c d", "assistant: a b", "user: x"]
    assert llm.closed_streams == 2
    assert "[stopped]" in capsys.readouterr().err


def test_ctrl_c_at_the_chat_prompt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert cli.main(["chat"]) == 130
    assert FakeLLM.made[0].is_shut_down


def test_a_refused_turn_leaves_the_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAX_PROMPT_LEN", "3")
    llm = chat_with(monkeypatch, "a b c d e\nx y\n")
    assert [roles_and_text(asked) for asked, _ in llm.asked] == [["user: x y"]]
    assert "5 tokens, MAX_PROMPT_LEN=3" in capsys.readouterr().err


def test_chat_has_one_answer_per_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--n", "2"]) == 2
    assert "n=2" in capsys.readouterr().err


# --- env


def test_env_is_json_with_the_head_of_a_bug_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCK_SIZE", "64")
    assert cli.main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tiny_vllm"]["version"] == tiny_vllm.__version__
    assert facts["switches"]["BLOCK_SIZE"] == "64"
    assert facts["packages"]["numpy"]
    assert facts["torch"]["version"].startswith(facts["packages"]["torch"].split("+")[0])
    assert facts["cpu"]["usable_cores"] >= 1


def test_env_as_text_names_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert all(section in out for section in collect())
