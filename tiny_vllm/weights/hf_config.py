"""config.json and generation_config.json of a Hugging Face folder, as one dictionary."""

from pathlib import Path
from typing import Any

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.hub import read_json
from tiny_vllm.weights.source import Config


def read_hf_config(folder: Path) -> Config:
    """The folder's config; end tokens of both files are joined, generation's first.

    Raises:
        ModelLoadError: no config.json, bad JSON, or quantised weights.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{folder} has no config.json: give a Hugging Face model folder, or a .gguf file "
            "by its full name"
        )
    config = read_json(path)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelLoadError(
            f"{path}: weights quantised by {method or 'an unknown method'} cannot be read; "
            "use unquantised safetensors or a GGUF file"
        )
    generation = _generation_config(folder)
    config.setdefault("bos_token_id", generation.get("bos_token_id"))
    eos_ids = [*_as_list(generation.get("eos_token_id")), *_as_list(config.get("eos_token_id"))]
    config["eos_token_id"] = list(dict.fromkeys(eos_ids))
    return config


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _as_list(value: object) -> list[int]:
    if value is None:
        return []
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelLoadError(f"eos_token_id={value!r} must be a token id or a list of them")
    return ids
