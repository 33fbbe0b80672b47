"""`tiny-vllm chat`: a conversation whose every turn finds the turns before it in the cache.

At a terminal, Ctrl-C stops an answer and keeps what was said; at the prompt it ends the
chat. Lines from a pipe work the same, without a prompt sign.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiny_vllm.cli.console import StreamPrinter, check_prompt_length, note, open_llm, stats_line
from tiny_vllm.cli.options import ENGINE, SAMPLING, in_cli_words, sampling_params, with_flags
from tiny_vllm.env import Switches
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.engine.llm import LLM

# one answer per turn, shown as text
CHAT_SAMPLING = SAMPLING.without("n", "logprobs", "prompt_logprobs")
HELP = "/reset forgets the conversation, /exit ends it, Ctrl-C stops an answer"


def read_line() -> str | None:
    """The next line of the user, None at the end of input."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


class Conversation:
    """The messages so far, and one turn at a time over them."""

    def __init__(
        self, llm: "LLM", params: SamplingParams, switches: Switches, system: str | None
    ) -> None:
        self.llm = llm
        self.params = params
        self.switches = switches
        self.head = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.head)
        self.failed_turns = 0

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self.head)

    def turn(self, text: str) -> None:
        """Answer one message; a refused one leaves the history as it was."""
        printer = StreamPrinter()
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            check_prompt_length(self.llm, asked, self.switches)
            printer.run(self.llm.stream(asked, self.params))
        except KeyboardInterrupt:
            note("\n[stopped]")
        except InvalidRequestError as error:
            note(f"error: {in_cli_words(str(error))}; /reset starts over")
            self.failed_turns += 1
            return
        else:
            if not self._report(printer.last):
                self.failed_turns += 1
                return
        self.messages = [*asked, {"role": "assistant", "content": printer.text}]

    def _report(self, last: RequestOutput | None) -> bool:
        if last is None or last.error:
            why = last.error if last else None
            note(f"error: {in_cli_words(why or 'the engine gave no output')}")
            return False
        note(stats_line(last, self.params.max_tokens))
        return True

    def run(self) -> None:
        """Read lines until the end of input or /exit."""
        while (line := read_line()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self.reset()
                note("[conversation forgotten]")
            elif text.startswith("/"):
                note(f"unknown command {text.split()[0]}: {HELP}")
            elif text:
                self.turn(text)


@with_flags(CHAT_SAMPLING, ENGINE)
def chat(
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk to a model; each turn shows how much of it came from the cache.

    Lines from a pipe are turns, too; the exit status is then 1 if one of them failed.
    """
    switches = Switches.read()
    params = sampling_params(sampling, switches)
    with open_llm(engine, switches) as llm:
        if sys.stdin.isatty():
            note(HELP)
        conversation = Conversation(llm, params, switches, system)
        conversation.run()
    if conversation.failed_turns and not sys.stdin.isatty():
        raise typer.Exit(1)
