"""Variants of a benchmark: an engine and changes to its config, under a name.

    origin,extended,no-prefix-cache
    small=block_size:16,max_num_seqs:4;again=;slots=engine:origin,max_num_seqs:1

`name=` opens a variant of one's own, `key:value` items belong to it, and `,` or `;`
separates.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import ConfigError

# module:class, imported only in the process that runs the variant
FACTORIES: dict[str, str] = {
    "extended": "tiny_vllm.engine:ExtendedEngine",
    "origin": "tiny_vllm.origin:OriginEngine",
}
NAMED: Mapping[str, Mapping[str, Any]] = {
    "no-prefix-cache": {"enable_prefix_caching": False},
    "no-chunked-prefill": {"enable_chunked_prefill": False},
    "no-cuda-graph": {"use_cuda_graph": False},
    "per-request-attention": {"attention": "per-request"},
}
BUILT_IN = (*FACTORIES, *NAMED)
SHARED_KEYS = ("model", "tokenizer", "revision")  # the same for all variants
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None, "auto": None}
# "auto" is a value of its own where the field is text
_AUTO_TEXT = ("dtype", "device", "load_format")


@dataclass(frozen=True, slots=True)
class Variant:
    """One side of the comparison. ``engine`` is a key of FACTORIES."""

    name: str
    engine: str = "extended"
    changes: Mapping[str, Any] = field(default_factory=dict)

    def config(self, base: Mapping[str, Any]) -> EngineConfig:
        """The engine config: ``base`` settings, overridden by this variant's changes.

        Raises:
            ConfigError: an unknown key or a value out of bounds; names the variant.
        """
        try:
            return EngineConfig.create(**{**base, **self.changes})
        except ConfigError as error:
            raise ConfigError(f"variant {self.name!r}: {error}") from error


def parse_variants(texts: Iterable[str]) -> tuple[Variant, ...]:
    """Parse the values of ``--variants``.

    Raises:
        ConfigError: an unknown or doubled name, an unknown key, a stray item, no variant.
    """
    variants: list[Variant] = []
    for item in _items(texts):
        name, is_custom, first = item.partition("=")
        if is_custom:
            variants.append(_changed(_new(name.strip()), first))
        elif ":" in item:
            if not variants or variants[-1].name in BUILT_IN:
                raise ConfigError(f"variant item {item!r} belongs to no variant: write name={item}")
            variants[-1] = _changed(variants[-1], item)
        else:
            variants.append(_built_in(item))
    if not variants:
        raise ConfigError(f"no variant given; built in: {', '.join(BUILT_IN)}")
    names = [variant.name for variant in variants]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"variant {name!r} is given twice; write other={name!r} to rename")
    return tuple(variants)


def _items(texts: Iterable[str]) -> list[str]:
    pieces = (piece.strip() for text in texts for piece in re.split("[,;]", text))
    return [piece for piece in pieces if piece]


def _built_in(name: str) -> Variant:
    if name in FACTORIES:
        return Variant(name, name)
    if name in NAMED:
        return Variant(name, "extended", NAMED[name])
    near = difflib.get_close_matches(name, BUILT_IN, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"built in: {', '.join(BUILT_IN)}"
    raise ConfigError(f"unknown variant {name!r}; {hint}")


def _new(name: str) -> Variant:
    if not re.fullmatch(r"[\w.+-]+", name) or name in BUILT_IN:
        raise ConfigError(
            f"variant name {name!r} cannot be used: take letters, digits and .+-_, "
            "and no built-in name"
        )
    return Variant(name)


def _changed(variant: Variant, item: str) -> Variant:
    """``variant`` with the change ``key:value``; an empty item changes nothing."""
    if not item.strip():
        return variant
    key, found, text = (part.strip() for part in item.partition(":"))
    if not found or not text:
        raise ConfigError(f"variant {variant.name!r}: {item!r} is not key:value")
    if key == "engine":
        if text not in FACTORIES:
            raise ConfigError(
                f"variant {variant.name!r}: engine {text!r} is not one of {', '.join(FACTORIES)}"
            )
        return Variant(variant.name, text, variant.changes)
    if key == "reasons":  # the engine's own notes: no setting
        raise ConfigError(f"variant {variant.name!r}: unknown EngineConfig key {key!r}")
    if key in SHARED_KEYS:
        raise ConfigError(
            f"variant {variant.name!r}: {key!r} is the same for all variants; use --{key}"
        )
    return Variant(variant.name, variant.engine, {**variant.changes, key: _value(key, text)})


def _value(key: str, text: str) -> Any:
    if text.lower() in _WORDS and not (text == "auto" and key in _AUTO_TEXT):
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
