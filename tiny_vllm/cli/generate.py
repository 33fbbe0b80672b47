"""`tiny-vllm generate`: complete prompts and print the text.

All prompts are queued at once and printed in their order: the text of the first unfinished
one as it comes. A prompt that is refused does not stop the others.
"""

import json
import math
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiny_vllm.cli.console import (
    Prompt,
    StreamPrinter,
    check_prompt_length,
    note,
    open_llm,
    stats,
    stats_line,
)
from tiny_vllm.cli.options import ENGINE, SAMPLING, in_cli_words, sampling_params, with_flags
from tiny_vllm.env import Switches
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import RequestOutput, TokenLogprobs
from tiny_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.engine.llm import LLM, OutputStream

# one line of --json; the numbers are null for a prompt that was refused
JSON_HELP = {
    "prompt_number": "place of the prompt among those given, from 1",
    "request_id": "id inside the engine; null if the prompt was refused",
    "prompt": "the text the model was given, chat template included; if refused, as it was typed",
    "outputs": "one object per completion, as below; empty if the prompt was refused",
    "error": "null, or why there is no full answer",
    "prompt_tokens": "length of the prompt in tokens",
    "cached_tokens": "how many of them came from the prefix cache",
    "generated_tokens": "tokens of all completions together",
    "tokens_per_s": "those per second from arrival to end; all prompts arrive together",
    "ttft_ms": "milliseconds from arrival to the first token",
    "prompt_logprobs": "with --prompt-logprobs: a list per prompt token, null for the first",
}
COMPLETION_HELP = {
    "text": "the text",
    "token_ids": "its token ids",
    "finish_reason": "stop (end token or stop text), length (--max-tokens or the context), error",
    "logprobs": "with --logprobs: a list per output token, the chosen token first, then the most "
    "likely ones, each as token_id, token (its text), logprob and rank",
    "cumulative_logprob": "with --logprobs: the sum over the chosen tokens",
}


def read_prompts(arguments: list[str], lines: bool) -> list[str]:
    """The prompts of the command line, or else of stdin.

    Raises:
        InvalidRequestError: there is none.
    """
    if arguments:
        return arguments
    if sys.stdin.isatty():
        raise InvalidRequestError("no prompt: give it as an argument or on stdin", "prompt")
    text = sys.stdin.read()
    prompts = [line for line in text.splitlines() if line.strip()] if lines else [text.rstrip("\n")]
    if not any(prompts):
        raise InvalidRequestError("no prompt: stdin is empty", "prompt")
    return prompts


def as_messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """A prompt as a chat: an optional system message and one of the user."""
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": prompt}]


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: the log-probability of what is ruled out is null."""
    return value if value is not None and math.isfinite(value) else None


def _entry(tokens: TokenLogprobs | None) -> list[dict[str, Any]] | None:
    if tokens is None:
        return None
    return [
        {"token_id": i, "token": p.decoded_token, "logprob": _finite(p.logprob), "rank": p.rank}
        for i, p in tokens.items()
    ]


def _entries(steps: "list[TokenLogprobs] | list[TokenLogprobs | None] | None") -> Any:
    return None if steps is None else [_entry(step) for step in steps]


def as_record(number: int, output: RequestOutput) -> dict[str, Any]:
    """One line of --json."""
    completions = [
        {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason and str(completion.finish_reason),
            "logprobs": _entries(completion.logprobs),
            "cumulative_logprob": _finite(completion.cumulative_logprob),
        }
        for completion in output.outputs
    ]
    return {
        "prompt_number": number,
        "request_id": output.request_id,
        "prompt": output.prompt,
        "outputs": completions,
        "error": output.error,
        **stats(output),
        "prompt_logprobs": _entries(output.prompt_logprobs),
    }


def refused_record(number: int, prompt: str, error: str) -> dict[str, Any]:
    """The line of --json for a prompt that was refused."""
    known = {"prompt_number": number, "prompt": prompt, "outputs": [], "error": error}
    return {**dict.fromkeys(JSON_HELP), **known}


class _Jobs:
    """All prompts of one call, queued together."""

    def __init__(self, llm: "LLM", params: SamplingParams, switches: Switches) -> None:
        self._llm, self._params, self._switches = llm, params, switches
        self.items: list[OutputStream | InvalidRequestError] = []

    @contextmanager
    def queued(self, prompts: list[Prompt]) -> Iterator[None]:
        """Queue every prompt, keep the error of a refused one; aborts what is left at the end."""
        with ExitStack() as stack:
            for prompt in prompts:
                try:
                    check_prompt_length(self._llm, prompt, self._switches)
                    stream = self._llm.stream(prompt, self._params)
                except InvalidRequestError as error:
                    self.items.append(error)
                else:
                    stack.callback(stream.close)
                    self.items.append(stream)
            yield


def _print_completions(output: RequestOutput) -> None:
    for completion in output.outputs:
        if len(output.outputs) > 1:
            typer.echo(f"--- completion {completion.index + 1}")
        typer.echo(completion.text)


def _print_json(record: dict[str, Any]) -> None:
    typer.echo(json.dumps(record, ensure_ascii=False, allow_nan=False))


def _name(number: int, count: int) -> str:
    return f"prompt {number} of {count}: " if count > 1 else ""


def _report(output: RequestOutput | None, name: str, params: SamplingParams) -> bool:
    """Print the numbers or the error of a finished request; True if all went well."""
    if output is None or output.error:
        why = output.error if output else None
        note(f"error: {name}{in_cli_words(why or 'the engine gave no output')}")
        return False
    note(stats_line(output, params.max_tokens))
    return True


def _answer(
    stream: "OutputStream", number: int, params: SamplingParams, as_json: bool
) -> RequestOutput | None:
    """Print one answer, as it comes where that is possible; returns its last output."""
    if not as_json and params.n == 1:
        printer = StreamPrinter()
        printer.run(stream)
        return printer.last
    newest = deque(stream, maxlen=1)
    output = newest[0] if newest else None
    if output is not None and as_json:
        _print_json(as_record(number, output))
    elif output is not None:
        _print_completions(output)
    return output


def _run(jobs: _Jobs, texts: list[str], params: SamplingParams, as_json: bool) -> bool:
    """Print every prompt's answer or error in order; True if none failed."""
    ok, count = True, len(texts)
    for number, (text, item) in enumerate(zip(texts, jobs.items, strict=True), 1):
        if count > 1 and not as_json:
            typer.echo(f"=== prompt {number} of {count}")
        if not isinstance(item, InvalidRequestError):
            output = _answer(item, number, params, as_json)
            ok &= _report(output, _name(number, count), params)
            continue
        error = in_cli_words(str(item))
        if as_json:
            _print_json(refused_record(number, text, error))
        note(f"error: {_name(number, count)}{error}")
        ok = False
    return ok


def _check_flags(params: SamplingParams, as_json: bool) -> None:
    """Refuse flags whose result would not be shown."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not as_json:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidRequestError(f"{flag} is shown with --json only: add --json", name)


@with_flags(SAMPLING, ENGINE)
def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts; without any, stdin is the prompt.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of stdin is a prompt.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per prompt instead of text.")
    ] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Complete prompts with a model and stream the text.

    All prompts run together as one batch and are printed in their order. Exit status 1: a
    prompt of several was refused or failed; the others are answered. 2: none was accepted.
    """
    switches = Switches.read()
    params = sampling_params(sampling, switches)
    _check_flags(params, as_json)
    texts = read_prompts(list(prompt or ()), lines)
    prompts: list[Prompt] = [as_messages(t, system) if chat or system else t for t in texts]
    with open_llm(engine, switches) as llm:
        jobs = _Jobs(llm, params, switches)
        with jobs.queued(prompts):
            ok = _run(jobs, texts, params, as_json)
    if not ok:
        refused = all(isinstance(item, InvalidRequestError) for item in jobs.items)
        raise typer.Exit(2 if refused else 1)
