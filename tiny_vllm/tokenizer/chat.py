"""Chat templates: Jinja programs that come with a model, run in a sandbox.

The environment gives templates what Hugging Face gives them: trimmed blocks, `tojson`,
`raise_exception`, `strftime_now`, loop controls and generation blocks.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tiny_vllm.errors import InvalidRequestError, ModelLoadError


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; rendering passes it through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.datetime.now().strftime(template)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A model's template and the special tokens it may name (`bos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the model's chat template is no valid Jinja: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **extra: Any
    ) -> str:
        """The conversation as text.

        Raises:
            InvalidRequestError: messages that are malformed or that the template refuses.
        """
        variables = {**self._special_tokens, **extra}
        variables["messages"] = [_check_message(i, m) for i, m in enumerate(_check_list(messages))]
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(variables)
        except ModelLoadError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error


def _check_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise InvalidRequestError(f"messages must be a list of messages, got {kind}", "messages")
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", "messages")
    return messages


def _check_message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{where} must be an object with role and content, got {type(message).__name__}",
            "messages",
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"{where}.role must be a non-empty string, got {role!r}", "messages"
        )
    return {**message, "content": _check_content(where, message)}


def _check_content(where: str, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        return "\n".join(_check_part(f"{where}.content[{i}]", p) for i, p in enumerate(content))
    raise InvalidRequestError(
        f"{where}.content must be a string or a list of text parts, got {type(content).__name__}",
        "messages",
    )


def _check_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise InvalidRequestError(
            f"{where} must be a text part {{'type': 'text', 'text': ...}}, got type {kind!r}; "
            "this engine reads text only",
            "messages",
        )
    return text
