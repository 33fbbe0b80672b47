"""The bytes each token stands for, whatever kind of vocabulary it comes from."""

import json
import re
from typing import Any

import tokenizers

from tiny_vllm.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXTUAL = ("BPEDecoder", "CTC")  # a token's text depends on its neighbours


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: one printable character per byte (printable Latin-1 stands for itself)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    characters.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return characters


class TokenPieces:
    """Lookup token id -> bytes, computed on first use.

    The bytes are those a token adds in the middle of a text. ``strips_leading_space``
    says that one space is dropped where a text begins.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._alphabet = byte_alphabet()
        self._added = {i: t.content for i, t in backend.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        parts = _decoder_parts(backend)
        kinds = [part["type"] for part in parts]
        for kind in kinds:
            if kind in _CONTEXTUAL:
                raise ModelLoadError(f"tokenizers with the decoder {kind!r} are not supported")
        if "ByteLevel" in kinds:
            self._compute = self._byte_level
        elif "ByteFallback" in kinds:
            self._compute = self._byte_fallback
        else:
            self._compute = self._by_difference
        self.strips_leading_space = not parts or any(map(_strips_space, parts))

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._known.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            piece = b"" if token is None else self._compute(token_id, token)
            self._known[token_id] = piece
        return piece

    def _byte_level(self, token_id: int, token: str) -> bytes:
        if token_id in self._added:
            return token.encode()
        try:
            return bytes(self._alphabet[character] for character in token)
        except KeyError:  # a vocabulary entry that is plain text
            return token.encode()

    def _byte_fallback(self, token_id: int, token: str) -> bytes:
        if token_id in self._added:
            return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()

    def _by_difference(self, token_id: int, token: str) -> bytes:
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return twice.removeprefix(once).encode()


def _decoder_parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps as dictionaries; empty when tokens are joined by spaces."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return list(state.get("decoders", [state]))


def _strips_space(part: dict[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return part.get("prepend_scheme") != "never"
    return part["type"] == "WordPiece" or (
        part["type"] == "Strip" and part.get("content") == " " and part.get("start", 0) > 0
    )
