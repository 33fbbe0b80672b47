"""The command line without a model: help, flags, switches, errors, streams.

`FakeLLM` answers with the words of the prompt, so that what is printed can be checked.
"""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import tiny_vllm
from tiny_vllm.cli import main as cli
from tiny_vllm.cli.environment import collect
from tiny_vllm.cli.generate import COMPLETION_HELP, JSON_HELP
from tiny_vllm.cli.options import engine_settings, in_cli_words, sampling_params
from tiny_vllm.env import Switches, usable_cpus
from tiny_vllm.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    RequestTooLongError,
    TinyVllmError,
    TraceError,
)
from tiny_vllm.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from tiny_vllm.sampling_params import SamplingParams


class FakeLLM:
    """Answers "w1 w2 ..." with the words of the last message, one at a time."""

    made: ClassVar[list["FakeLLM"]] = []
    interrupt_after: ClassVar[int | None] = None
    error: ClassVar[str | None] = None
    finish_reason: ClassVar[FinishReason] = FinishReason.STOP

    def __init__(self, **config: Any) -> None:
        self.config = config
        self.engine = SimpleNamespace(info=SimpleNamespace(device="cpu", config={}))
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.events: list[str] = []
        self.closed_streams = 0
        self.is_shut_down = False
        FakeLLM.made.append(self)

    def encode(self, prompt: Any) -> tuple[str, list[int]]:
        text = prompt if isinstance(prompt, str) else " ".join(m["content"] for m in prompt)
        return text, list(range(len(text.split())))

    def _output(
        self, prompt: Any, words: list[str], params: SamplingParams, finished: bool
    ) -> RequestOutput:
        text, ids = self.encode(prompt)
        outputs = [
            CompletionOutput(i, " ".join(words), list(range(len(words)))) for i in range(params.n)
        ]
        for completion in outputs if finished else []:
            completion.finish_reason = self.finish_reason
            if params.logprobs is not None:
                best = [{i: Logprob(-0.5, 1, "w"), 99: Logprob(-inf, 2)} for i in range(len(words))]
                completion.logprobs, completion.cumulative_logprob = best, -0.5 * len(words)
        metrics = RequestMetrics(10.0, first_token_time=10.5, finished_time=12.0)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *({i: Logprob(-1.5, 3)} for i in ids[1:])]
        return RequestOutput(
            "0", text, ids, outputs, finished, len(ids) - 1, prompt_logprobs, metrics,
            error=self.error,
        )  # fmt: skip

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        if prompt == "refuse me":
            raise InvalidRequestError("max_model_len=3 holds no more; raise max_model_len")
        self.asked.append((prompt, params))
        self.events.append("queued")
        return self._stream(prompt, params)

    def _stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        words = (prompt if isinstance(prompt, str) else prompt[-1]["content"]).split()
        self.events.append("read")
        try:
            for count in range(1, len(words) + 1):
                if self.interrupt_after == count - 1:
                    raise KeyboardInterrupt
                yield self._output(prompt, words[:count], params, count == len(words))
        finally:
            self.closed_streams += 1

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture(autouse=True)
def _fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_vllm.__dict__, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeLLM, "interrupt_after", None)
    monkeypatch.setattr(FakeLLM, "error", None)
    monkeypatch.setattr(FakeLLM, "finish_reason", FinishReason.STOP)


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
    assert all(word in done.stdout for word in wanted) or command in ("env", "explain")


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
    for typed in ("generat", "gen", "genrate"):
        assert cli.main([typed, "x"]) == 2
        error = capsys.readouterr().err
        assert error == f"error: unknown command {typed!r}; did you mean 'generate'?\n"
    assert cli.main(["zzz"]) == 2
    assert "there are bench, generate" in capsys.readouterr().err
    assert cli.main(["env", "--nope"]) == 2
    assert "--nope" in capsys.readouterr().err


def test_origin_is_bench_with_one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda argv: called.append(argv) or 0)
    monkeypatch.setattr(sys, "argv", ["tiny-vllm-origin", "--seed", "3"])
    assert cli.origin_main() == 0
    assert called == [["bench", "--variants", "origin", "--seed", "3"]]


@pytest.mark.parametrize("argv", [["-v", "generate", "a"], ["generate", "a", "-v"]])
def test_verbose_on_either_side_of_the_command(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    monkeypatch.setattr(cli.logging, "basicConfig", lambda level, **_: levels.append(level))
    assert cli.main(argv) == 0
    assert levels == [cli.logging.INFO]


def test_without_its_packages_the_module_says_which_one() -> None:
    """A plain copy of the tree and a Python without typer used to end in a traceback."""
    code = (
        "import sys, runpy\nsys.modules['typer'] = None\n"
        "runpy.run_module('tiny_vllm', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the package typer is not installed for ")
    assert "make setup" in done.stderr
    assert done.stderr.count("\n") == 1


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
        (ModuleNotFoundError("bad value", name="torch.nn"), 1),
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
    assert err.count("\n") == 1
    if isinstance(error, ModuleNotFoundError):
        assert "the package torch is not installed" in err
    else:
        assert err.strip() == ("interrupted" if status == 130 else "error: bad value")


@pytest.mark.parametrize(
    ("message", "spoken"),
    [
        ("name one with tokenizer=...", "name one with --tokenizer ..."),
        ("max_model_len=9 is above; lower it", "--max-model-len=9 is above; lower it"),
        ("lower max_num_seqs to 4", "lower --max-num-seqs to 4"),
        ("n=0 is out of range", "--n=0 is out of range"),
        ("the model 'x' of n tokens", "the model 'x' of n tokens"),
        ("did you mean 'block_size'?", "did you mean 'block_size'?"),
        ("use --max-model-len=4", "use --max-model-len=4"),
        ("skip_tokenizer_init, or none", "skip_tokenizer_init, or none"),
    ],
)
def test_commands_speak_of_flags(message: str, spoken: str) -> None:
    """A hint like tokenizer=... is Python, and no help at a terminal."""
    assert in_cli_words(message) == spoken


def test_hints_of_the_library_become_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**config: Any) -> None:
        raise ConfigError("no tokenizer; name one with tokenizer=...")

    monkeypatch.setitem(tiny_vllm.__dict__, "LLM", fail)
    assert cli.main(["generate", "hello"]) == 2
    assert capsys.readouterr().err == "error: no tokenizer; name one with --tokenizer ...\n"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--top-k", "-3"], "--top-k=-3 is out of range"),
        (["--logprobs", "2"], "--logprobs is shown with --json only"),
        (["--prompt-logprobs", "0"], "--prompt-logprobs is shown with --json only"),
        (["--logit-bias", "x=1"], "--logit-bias 'x=1'"),
        (["--min-tokens", "9", "--max-tokens", "8"], "--min-tokens=9 is above --max-tokens=8"),
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
    assert "USE_CUDA_GRAPH=1 (or --use-cuda-graph) has no effect on cpu" in capsys.readouterr().err
    assert cli.main(["generate", "hello", "--no-use-cuda-graph"]) == 0
    assert "no effect" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"]])
def test_a_flag_without_effect_is_said_like_a_switch(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "")
    flags = ["--use-cuda-graph", "--async-scheduling", "--gpu-memory-utilization", "0.5"]
    assert cli.main([*command, *flags, "--threads", "900"]) == 0
    error = capsys.readouterr().err
    for name in ("--use-cuda-graph)", "--async-scheduling", "--gpu-memory-utilization"):
        assert f"{name} has no effect on cpu" in error
    assert f"--num-threads 900 is above the {len(usable_cpus())} core(s)" in error
    assert FakeLLM.made[0].config["num_threads"] == 900


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


def test_all_prompts_are_queued_before_the_first_is_read() -> None:
    """Prompts used to run one by one, unless --json was given."""
    assert cli.main(["generate", "a b", "c"]) == 0
    assert FakeLLM.made[0].events == ["queued", "queued", "read", "read"]


def test_json_is_one_line_a_request_in_one_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "é b", "c", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["é b", "c"]
    assert lines[0] == {
        "prompt_number": 1,
        "request_id": "0",
        "prompt": "é b",
        "outputs": [
            {
                "text": "é b",
                "token_ids": [0, 1],
                "finish_reason": "stop",
                "logprobs": None,
                "cumulative_logprob": None,
            }
        ],
        "error": None,
        "prompt_tokens": 2,
        "cached_tokens": 1,
        "generated_tokens": 2,
        "tokens_per_s": 1.0,
        "ttft_ms": 500.0,
        "prompt_logprobs": None,
    }
    assert set(JSON_HELP) == set(lines[0])  # what docs/cli.md documents
    assert set(COMPLETION_HELP) == set(lines[0]["outputs"][0])
    assert FakeLLM.made[0].events == ["queued", "queued", "read", "read"]


def test_logprobs_are_in_the_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    """They used to be accepted and dropped. JSON has no infinity: null."""
    argv = ["generate", "a b", "--json", "--logprobs", "2", "--prompt-logprobs", "1"]
    assert cli.main(argv) == 0
    line = json.loads(capsys.readouterr().out)
    completion = line["outputs"][0]
    assert completion["cumulative_logprob"] == -1.0
    assert completion["logprobs"][0] == [
        {"token_id": 0, "token": "w", "logprob": -0.5, "rank": 1},
        {"token_id": 99, "token": None, "logprob": None, "rank": 2},
    ]
    assert len(completion["logprobs"]) == 2
    assert line["prompt_logprobs"] == [
        None,
        [{"token_id": 1, "token": None, "logprob": -1.5, "rank": 3}],
    ]


@pytest.mark.parametrize("from_stdin", [False, True])
def test_a_bad_prompt_of_many_is_one_line_and_the_rest_go_on(
    from_stdin: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One prompt that is refused used to end the whole command with no output."""
    prompts = ["a b", "refuse me", "c"]
    type_in(monkeypatch, "\n".join(prompts))
    argv = ["generate", "--lines"] if from_stdin else ["generate", *prompts]
    assert cli.main([*argv, "--json"]) == 1
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt_number"] for line in lines] == [1, 2, 3]
    assert [line["prompt"] for line in lines] == prompts
    why = "--max-model-len=3 holds no more; raise --max-model-len"
    assert [line["error"] for line in lines] == [None, why, None]
    assert set(lines[1]) == set(JSON_HELP)
    assert (lines[1]["outputs"], lines[1]["prompt_tokens"]) == ([], None)
    assert f"error: prompt 2 of 3: {why}" in err.splitlines()
    type_in(monkeypatch, "\n".join(prompts))
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    assert out == "=== prompt 1 of 3\na b\n=== prompt 2 of 3\n=== prompt 3 of 3\nc\n"
    assert f"error: prompt 2 of 3: {why}" in err.splitlines()


def test_no_accepted_prompt_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "refuse me", "refuse me"]) == 2
    assert cli.main(["generate", "refuse me", "--json"]) == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["error"]


@pytest.mark.parametrize(
    ("limit", "words"), [("2", "cut off by --max-tokens 2"), ("9", "cut off: the context is full")]
)
def test_an_answer_that_was_cut_off_is_marked(
    limit: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLLM, "finish_reason", FinishReason.LENGTH)
    type_in(monkeypatch, "a b\n")
    for command in (["generate", "a b"], ["chat"]):
        assert cli.main([*command, "--max-tokens", limit]) == 0
        assert capsys.readouterr().err.rstrip().endswith(f"; {words}]")


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
    err = capsys.readouterr().err
    assert "error: prompt 1 of 2: the pool is too small" in err
    assert "error: prompt 2 of 2: the pool is too small" in err


def test_ctrl_c_in_generate_aborts_and_shuts_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLLM, "interrupt_after", 1)
    assert cli.main(["generate", "a b c"]) == 130
    assert capsys.readouterr().out == "a"
    assert (FakeLLM.made[0].closed_streams, FakeLLM.made[0].is_shut_down) == (1, True)


# --- chat


def chat_with(monkeypatch: pytest.MonkeyPatch, text: str, *argv: str, status: int = 0) -> FakeLLM:
    type_in(monkeypatch, text)
    assert cli.main(["chat", *argv]) == status
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
    """From a pipe the exit status tells of it, too."""
    monkeypatch.setenv("MAX_PROMPT_LEN", "3")
    llm = chat_with(monkeypatch, "a b c d e\nx y\n", status=1)
    assert [roles_and_text(asked) for asked, _ in llm.asked] == [["user: x y"]]
    assert "5 tokens, MAX_PROMPT_LEN=3" in capsys.readouterr().err


def test_a_failed_turn_from_a_pipe_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "error", "the pool is too small")
    chat_with(monkeypatch, "a\n", status=1)


@pytest.mark.parametrize(
    ("command", "flag"),
    [("chat", "--n"), ("chat", "--logprobs"), ("chat", "--prompt-logprobs")]
    + [(name, "--skip-tokenizer-init") for name in ("bench", "generate", "chat")],
)
def test_flags_without_a_use_are_not_offered(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--help"]) == 0
    assert flag not in capsys.readouterr().out.split()
    assert cli.main([command, flag, "2"]) == 2
    assert f"No such option: {flag}" in capsys.readouterr().err


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


def test_env_says_which_switch_has_no_effect_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tiny_vllm.cli.environment.torch_facts", dict)
    monkeypatch.setenv("USE_CUDA_GRAPH", "1")
    assert cli.main(["env"]) == 0
    assert "USE_CUDA_GRAPH=1 (or --use-cuda-graph) has no effect on cpu" in capsys.readouterr().out
