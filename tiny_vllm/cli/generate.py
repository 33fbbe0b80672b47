"""`tiny-vllm generate`: complete prompts and print the text.

Text is streamed, one prompt after the other; with --json or several completions the
prompts run as one batch.
"""

import json
import sys
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
from tiny_vllm.cli.options import ENGINE, SAMPLING, sampling_params, with_flags
from tiny_vllm.env import Switches
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.engine.llm import LLM


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


def as_record(output: RequestOutput) -> dict[str, Any]:
    """One line of --json."""
    completions = [
        {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason and str(completion.finish_reason),
        }
        for completion in output.outputs
    ]
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "outputs": completions,
        "error": output.error,
        **stats(output),
    }


def _print_completions(output: RequestOutput) -> None:
    for completion in output.outputs:
        if len(output.outputs) > 1:
            typer.echo(f"--- completion {completion.index + 1}")
        typer.echo(completion.text)


def _report(output: RequestOutput | None) -> bool:
    """Print the numbers or the error of a finished request; True if all went well."""
    if output is None or output.error:
        note(f"error: {output.error if output else 'the engine gave no output'}")
        return False
    note(stats_line(output))
    return True


def _run_batch(llm: "LLM", prompts: list[Prompt], params: SamplingParams, as_json: bool) -> bool:
    """All prompts at once, printed in order; True if none failed."""
    ok = True
    for output in llm.generate(prompts, params, use_progress=False):
        if as_json:
            typer.echo(json.dumps(as_record(output), ensure_ascii=False))
        else:
            _print_completions(output)
        ok &= _report(output)
    return ok


def _run_streamed(llm: "LLM", prompts: list[Prompt], params: SamplingParams) -> bool:
    """One prompt after the other, printed as the text comes; True if none failed."""
    ok = True
    for index, prompt in enumerate(prompts):
        if len(prompts) > 1:
            typer.echo(f"=== prompt {index + 1} of {len(prompts)}")
        printer = StreamPrinter()
        printer.run(llm.stream(prompt, params))
        ok &= _report(printer.last)
    return ok


@with_flags(SAMPLING, ENGINE)
def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts; without any, stdin is the prompt.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of stdin is a prompt.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Run all prompts as one batch; one JSON line each.")
    ] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Complete prompts with a model and stream the text."""
    switches = Switches.read()
    params = sampling_params(sampling, switches)
    texts = read_prompts(list(prompt or ()), lines)
    prompts: list[Prompt] = [as_messages(t, system) if chat or system else t for t in texts]
    with open_llm(engine, switches) as llm:
        for item in prompts:
            check_prompt_length(llm, item, switches)
        if as_json or params.n > 1:
            ok = _run_batch(llm, prompts, params, as_json)
        else:
            ok = _run_streamed(llm, prompts, params)
    if not ok:
        raise typer.Exit(1)
