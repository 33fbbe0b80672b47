"""The command `tiny-vllm`: one table of sub-commands, each loaded when it is called.

Nothing here imports torch. Errors that a user can cause end as one line on stderr:
exit status 2 for bad input, 1 for other failures, 130 after Ctrl-C.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

from tiny_vllm import __version__
from tiny_vllm.errors import (
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    TinyVllmError,
    TraceError,
)

# command -> module and function
COMMANDS = {
    "bench": ("tiny_vllm.cli.bench", "bench"),
    "generate": ("tiny_vllm.cli.generate", "generate"),
    "chat": ("tiny_vllm.cli.chat", "chat"),
    "env": ("tiny_vllm.cli.environment", "environment"),
}

BAD_INPUT = (ConfigError, InvalidRequestError, ModelLoadError, TraceError)


def exit_status(error: TinyVllmError) -> int:
    """2 for what the caller can put right, 1 for the rest."""
    return 2 if isinstance(error, BAD_INPUT) else 1


def guarded(func: Callable[..., None]) -> Callable[..., None]:
    """Turn errors and Ctrl-C into an exit status and one line on stderr."""

    @functools.wraps(func)
    def command(*args: Any, **kwargs: Any) -> None:
        try:
            func(*args, **kwargs)
        except TinyVllmError as error:
            typer.echo("error: " + " ".join(str(error).split()), err=True)
            raise typer.Exit(exit_status(error)) from None
        except BrokenPipeError:
            raise  # the reader has gone: click ends quietly
        except OSError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None

    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tiny-vllm-extend {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log to stderr.")] = False,
) -> None:
    """LLM inference for long shared prefixes, and the benchmark that proves it."""
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


def build_app(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """Build the application with some of its commands; only their modules are imported."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in names:
        module, function = COMMANDS[name]
        app.command(name)(guarded(getattr(importlib.import_module(module), function)))
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    called = [argument for argument in arguments if not argument.startswith("-")][:1]
    app = build_app(called) if called and called[0] in COMMANDS else build_app()
    try:
        app(args=arguments, prog_name="tiny-vllm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def origin_main() -> int:
    """`tiny-vllm-origin`: the benchmark with the baseline alone."""
    return main(["bench", "--variants", "origin", *sys.argv[1:]])
