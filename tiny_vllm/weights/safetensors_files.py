"""Weights from safetensors: one file, or shards with model.safetensors.index.json.

Shards are opened one after another. Every fault names the file at fault.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.hub import read_json
from tiny_vllm.weights.hf_config import read_hf_config

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Buffers that old checkpoints store although they follow from the config.
_DERIVED = (".rotary_emb.inv_freq", ".attn.masked_bias")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SafetensorsWeights:
    """Reads the weights of a Hugging Face folder; see `WeightSource`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_hf_config(folder)
        self._files = _find_files(folder)  # file -> names, None = all that it holds

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, names in self._files.items():
            with _open(path) as file:
                held = set(file.keys())
                for name in names if names is not None else sorted(held):
                    if name not in held:
                        raise ModelLoadError(
                            f"{path} lacks tensor {name!r}, which {_INDEX} places there; "
                            "download both again"
                        )
                    if not name.endswith(_DERIVED):
                        yield name, _read(file, path, name)


def _find_files(folder: Path) -> dict[Path, list[str] | None]:
    """The safetensors files of a folder in a fixed order, all of them present."""
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise ModelLoadError(
            f"{folder} holds {len(found)} safetensors files and no {_INDEX} that says what "
            "belongs together; download the index"
        )
    raise ModelLoadError(
        f"{folder} holds no safetensors weights ({_SINGLE} or {_INDEX}); other formats must "
        "be converted first, or use --load-format dummy"
    )


def _indexed_files(folder: Path) -> dict[Path, list[str] | None]:
    index = folder / _INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map; download it again")
    files: dict[Path, list[str] | None] = {}
    for name, file in sorted(weight_map.items(), key=lambda item: (str(item[1]), item[0])):
        names = files.setdefault(folder / str(file), [])
        assert names is not None
        names.append(name)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of {len(files)} shards that {_INDEX} names: "
            f"{', '.join(missing)}; download them"
        )
    return files


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{path} is truncated or corrupt ({error}); it has {path.stat().st_size} bytes: "
            "download it again"
        ) from error
    with file as opened:
        yield opened


def _read(file: Any, path: Path, name: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = file.get_tensor(name)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{path}: tensor {name!r} cannot be read: {error}") from error
    if tensor.dtype not in _DTYPES:
        raise ModelLoadError(
            f"{path}: tensor {name!r} is stored as {tensor.dtype}; only float32, bfloat16 and "
            "float16 can be read"
        )
    return tensor
