"""A tokenizer from a Hugging Face folder: tokenizer.json and the files beside it."""

from pathlib import Path
from typing import Any

import tokenizers

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.hub import read_json
from tiny_vllm.tokenizer.chat import ChatTemplate
from tiny_vllm.tokenizer.tokenizer import Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Build the tokenizer of a folder.

    Raises:
        ModelLoadError: no tokenizer.json, or a file that cannot be read; names it.
    """
    backend = _read_backend(folder / "tokenizer.json")
    settings = _read_optional(folder / "tokenizer_config.json")
    generation = _read_optional(folder / "generation_config.json")
    named = _named_tokens(settings)
    bos_id = _token_id(backend, named.get("bos_token"))
    eos_ids = generation.get("eos_token_id") or []
    eos_ids = list(eos_ids) if isinstance(eos_ids, list) else [eos_ids]
    own_eos = _token_id(backend, named.get("eos_token"))
    source = _template_source(folder, settings)
    return Tokenizer(
        backend,
        bos_token_id=generation.get("bos_token_id") if bos_id is None else bos_id,
        eos_token_ids=eos_ids if own_eos is None else [*eos_ids, own_eos],
        chat_template=ChatTemplate(source, named) if source else None,
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelLoadError(
            f"{path.parent} has no tokenizer.json: convert the tokenizer to that form, name "
            "another one (tokenizer=...), or use token ids only (skip_tokenizer_init)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Texts of the special tokens, which are stored as a string or as an object."""
    named = {}
    for name in _NAMED_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _token_id(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    stored = settings.get("chat_template")
    if stored is None:
        stored = _read_optional(folder / "chat_template.json").get("chat_template")
    if isinstance(stored, list):  # several named ones
        stored = {entry["name"]: entry["template"] for entry in stored}.get("default")
    return stored or None
