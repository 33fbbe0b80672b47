"""What `generate` and `chat` share: the model, the streamed text, the line of numbers.

Text goes to stdout and nothing else does; everything about it goes to stderr.
"""

import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, cast

import typer

from tiny_vllm.cli.options import engine_settings
from tiny_vllm.env import Switches, setting_notes
from tiny_vllm.errors import RequestTooLongError
from tiny_vllm.outputs import FinishReason, RequestOutput

if TYPE_CHECKING:
    from tiny_vllm.engine.llm import LLM

Prompt = str | list[dict[str, str]]


def note(text: str) -> None:
    """Print a line about the run on stderr."""
    typer.echo(text, err=True)


@contextmanager
def open_llm(flags: Mapping[str, Any], switches: Switches) -> Iterator["LLM"]:
    """Load the model; reports settings without effect, and shuts the engine down at the end."""
    from tiny_vllm import LLM

    settings = engine_settings(flags, switches)
    llm = LLM(**settings)
    try:
        info = llm.engine.info
        for sentence in setting_notes(settings, info.device, info.config):
            note(sentence)
        yield llm
    finally:
        llm.shutdown()


def check_prompt_length(llm: "LLM", prompt: Prompt, switches: Switches) -> None:
    """Raises RequestTooLongError above MAX_PROMPT_LEN, if that is set."""
    limit = switches.max_prompt_len
    if limit is not None and (length := len(llm.encode(prompt)[1])) > limit:
        raise RequestTooLongError(
            f"the prompt has {length} tokens, MAX_PROMPT_LEN={limit} allows no more; "
            "shorten it or raise MAX_PROMPT_LEN",
            "prompt",
        )


class StreamPrinter:
    """Prints the first completion of a request as it grows; ``last`` is its newest output."""

    def __init__(self) -> None:
        self.last: RequestOutput | None = None
        self.text = ""

    def run(self, stream: Iterator[RequestOutput]) -> None:
        """Print to the end. An error or Ctrl-C closes the stream, which aborts the request."""
        with closing(cast("Generator[RequestOutput]", stream)) as outputs:
            for self.last in outputs:
                if self.last.outputs:
                    self._print(self.last.outputs[0].text)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        sys.stdout.write(text[len(self.text) :])
        sys.stdout.flush()
        self.text = text


def seconds(output: RequestOutput) -> tuple[float | None, float | None]:
    """Time to the first token and to the end, in seconds; None where there is none."""
    times = output.metrics
    if times is None:
        return None, None
    start, first, end = times.arrival_time, times.first_token_time, times.finished_time
    return (first and first - start), (end and end - start)


def stats(output: RequestOutput) -> dict[str, Any]:
    """The numbers of one request: tokens, tokens per second of its whole life, TTFT."""
    generated = sum(len(completion.token_ids) for completion in output.outputs)
    ttft, e2el = seconds(output)
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "generated_tokens": generated,
        "tokens_per_s": round(generated / e2el, 2) if e2el else None,
        "ttft_ms": round(1000 * ttft, 2) if ttft is not None else None,
    }


def _cut_off(output: RequestOutput, max_tokens: int | None) -> str | None:
    """Says that an answer did not end by itself, and at which limit."""
    cut = [c for c in output.outputs if c.finish_reason is FinishReason.LENGTH]
    if not cut:
        return None
    at_limit = any(len(c.token_ids) == max_tokens for c in cut)
    return f"cut off by --max-tokens {max_tokens}" if at_limit else "cut off: the context is full"


def stats_line(output: RequestOutput, max_tokens: int | None = None) -> str:
    """One line of numbers for people; ``max_tokens`` is the limit that was asked for."""
    s = stats(output)
    parts = [f"{s['prompt_tokens']} prompt tokens, {s['cached_tokens']} of them cached"]
    parts.append(f"{s['generated_tokens']} generated")
    if s["tokens_per_s"] is not None:
        parts.append(f"{s['tokens_per_s']:.1f} tok/s")
    if s["ttft_ms"] is not None:
        parts.append(f"first token after {s['ttft_ms']:.0f} ms")
    if (cut := _cut_off(output, max_tokens)) is not None:
        parts.append(cut)
    return f"[{'; '.join(parts)}]"
