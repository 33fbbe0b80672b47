"""`tiny-vllm chat`: a conversation whose every turn finds the turns before it in the cache.

At a terminal, Ctrl-C stops an answer and keeps what was said; at the prompt it ends the
chat. Lines from a pipe work the same, without a prompt sign.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiny_vllm.cli.console import StreamPrinter, check_prompt_length, note, open_llm, stats_line
from tiny_vllm.cli.options import ENGINE, SAMPLING, sampling_params, with_flags
from tiny_vllm.env import Switches
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.engine.llm import LLM

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
            note(f"error: {error}; /reset starts over")
            return
        else:
            if not self._report(printer.last):
                return
        self.messages = [*asked, {"role": "assistant", "content": printer.text}]

    def _report(self, last: RequestOutput | None) -> bool:
        if last is None or last.error:
            note(f"error: {last.error if last else 'the engine gave no output'}")
            return False
        note(stats_line(last))
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


@with_flags(SAMPLING, ENGINE)
def chat(
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk to a model; each turn shows how much of it came from the cache."""
    switches = Switches.read()
    params = sampling_params(sampling, switches)
    if params.n > 1:
        raise InvalidRequestError(f"n={params.n}: a chat has one answer per turn, use n=1", "n")
    with open_llm(engine, switches) as llm:
        if sys.stdin.isatty():
            note(HELP)
        Conversation(llm, params, switches, system).run()
