"""The command `tiny-vllm`: one table of sub-commands, each loaded when it is called.

Nothing here imports torch. Errors that a user can cause end as one line on stderr:
exit status 2 for bad input, 1 for other failures, 130 after Ctrl-C.
"""

import difflib
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

from tiny_vllm import __version__
from tiny_vllm.cli.options import in_cli_words
from tiny_vllm.env import missing_package
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
    "explain": ("tiny_vllm.cli.explain", "explain"),
    "env": ("tiny_vllm.cli.environment", "environment"),
}

BAD_INPUT = (ConfigError, InvalidRequestError, ModelLoadError, TraceError)


def exit_status(error: TinyVllmError) -> int:
    """2 for what the caller can put right, 1 for the rest."""
    return 2 if isinstance(error, BAD_INPUT) else 1


Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log to stderr.")]


def _set_log(verbose: bool) -> None:
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


def with_verbose(func: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flag -v, too: people write it on either side of the name."""
    signature = inspect.signature(func)
    extra = inspect.Parameter(
        "verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose
    )

    @functools.wraps(func)
    def command(*args: Any, verbose: bool = False, **kwargs: Any) -> None:
        _set_log(verbose)
        func(*args, **kwargs)

    parameters = [*signature.parameters.values(), extra]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def guarded(func: Callable[..., None]) -> Callable[..., None]:
    """Turn errors and Ctrl-C into an exit status and one line on stderr."""

    @functools.wraps(func)
    def command(*args: Any, **kwargs: Any) -> None:
        try:
            func(*args, **kwargs)
        except TinyVllmError as error:
            typer.echo("error: " + in_cli_words(" ".join(str(error).split())), err=True)
            raise typer.Exit(exit_status(error)) from None
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("tiny_vllm"):
                raise
            typer.echo(f"error: {missing_package(error)}", err=True)
            raise typer.Exit(1) from None
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
    verbose: Verbose = False,
) -> None:
    """LLM inference for long shared prefixes, and the benchmark that proves it."""
    _set_log(verbose)


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
        command = with_verbose(getattr(importlib.import_module(module), function))
        app.command(name)(guarded(command))
    return app


def _unknown_command(name: str) -> str:
    near = [known for known in COMMANDS if known.startswith(name)]
    near = near or difflib.get_close_matches(name, COMMANDS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"error: unknown command {name!r}; {hint}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    called = [argument for argument in arguments if not argument.startswith("-")][:1]
    if called and called[0] not in COMMANDS:
        typer.echo(_unknown_command(called[0]), err=True)
        return 2
    app = build_app(called) if called and called[0] in COMMANDS else build_app()
    try:
        app(args=arguments, prog_name="tiny-vllm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def origin_main() -> int:
    """`tiny-vllm-origin`: the benchmark with the baseline alone."""
    return main(["bench", "--variants", "origin", *sys.argv[1:]])
