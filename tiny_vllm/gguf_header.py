"""GGUF container headers: metadata and tensor directory, never tensor data. Stdlib only.

Layout (GGUF specification v2 and v3, little-endian):
    magic, version, counts | key-value pairs | tensor directory | padding | tensor data
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_vllm.errors import ModelLoadError

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
# value type number -> struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_TOKEN_CONTROL = 3
# Token texts that end a turn or a document; files often store only one of their ids.
_END_TEXTS = frozenset(
    "<|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|im_end|> <|end|> </s>".split()
)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor directory.

    Attributes:
        shape: slowest dimension first, as torch writes it.
        type_id: number of the ggml storage type.
        offset: first byte of the data, counted from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything a GGUF file says before its tensor data. ``size`` is the file's, in bytes."""

    path: Path
    size: int
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an output: the declared ones first, then those known by their text."""
        names = ("eos_token_id", "eot_token_id", "eom_token_id")
        declared = [self.metadata.get(f"tokenizer.ggml.{name}") for name in names]
        tokens = self.metadata.get("tokenizer.ggml.tokens", ())
        types = self.metadata.get("tokenizer.ggml.token_type", ())
        by_text = [
            index
            for index, (text, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _TOKEN_CONTROL and text in _END_TEXTS
        ]
        found = [token_id for token_id in declared if token_id is not None] + by_text
        return tuple(dict.fromkeys(found))


class _Cursor:
    """Reads values one after another; running off the end names the file and both sizes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.offset = path, data, 0

    def need(self, count: int) -> int:
        """Claim ``count`` bytes; return where they start."""
        start, end = self.offset, self.offset + count
        if end > len(self.data):
            raise ModelLoadError(
                f"{self.path} is truncated or corrupt: its header needs at least {end} bytes, "
                f"the file has {len(self.data)}; download it again"
            )
        self.offset = end
        return start

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        return struct.unpack_from(f"<{count}{code}", self.data, self.need(size))

    def string(self) -> str:
        (length,) = self.unpack("Q")
        start = self.need(length)
        try:
            return self.data[start : self.offset].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{self.path} is corrupt: {error} at byte {start}") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.unpack("I")[0], self.unpack("Q")[0]
            if item_kind in _SCALARS:
                return list(self.unpack(_SCALARS[item_kind], count))
            return [self.value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path} is corrupt: unknown metadata type {kind}")
        return self.unpack(_SCALARS[kind])[0]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor directory of a GGUF file.

    Raises:
        ModelLoadError: not a GGUF file, an unsupported version, or a file that ends
            inside its header; names the file.
    """
    size = path.stat().st_size
    if size < 24:
        raise ModelLoadError(f"{path} is no GGUF file: it has {size} bytes, a header needs 24")
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _parse(path, size, _Cursor(path, data))


def _parse(path: Path, size: int, cursor: _Cursor) -> GgufHeader:
    magic = bytes(cursor.data[cursor.need(4) : 4])
    if magic != _MAGIC:
        raise ModelLoadError(f"{path} is no GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
    (version,) = cursor.unpack("I")
    if version not in (2, 3):
        raise ModelLoadError(
            f"{path} has GGUF version {version}; little-endian versions 2 and 3 can be read: "
            "convert the model again"
        )
    num_tensors, num_pairs = cursor.unpack("Q", 2)
    metadata = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("I")[0])
    if metadata.get("split.count", 1) > 1:
        raise ModelLoadError(
            f"{path} is one of {metadata['split.count']} parts; merge them first "
            "(llama-gguf-split --merge)"
        )
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{path} is corrupt: general.alignment is {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = tuple(GgufTensor(n, shape, kind, start + at) for n, shape, kind, at in entries)
    return GgufHeader(path, size, metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (num_dims,) = cursor.unpack("I")
    dims = cursor.unpack("Q", num_dims)
    (kind,) = cursor.unpack("I")
    (offset,) = cursor.unpack("Q")
    return name, tuple(reversed(dims)), kind, offset
