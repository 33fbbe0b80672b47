"""Stored weights behind one interface: a config and an iterator over named tensors.

Names and config keys are those of Hugging Face, whatever the file. One tensor is in
memory at a time. Whether anything is missing or left over is the model loader's check.
"""

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.hub import ModelFiles, ModelKind
from tiny_vllm.weights.dummy import dummy_tensors
from tiny_vllm.weights.source import Config, WeightSource

__all__ = ["Config", "WeightSource", "dummy_tensors", "open_weights", "read_config"]

_FORMATS = {
    ModelKind.GGUF: ("auto", "gguf", "dummy"),
    ModelKind.HF_FOLDER: ("auto", "safetensors", "dummy"),
    ModelKind.PRESET: ("dummy",),
}


def read_config(files: ModelFiles, load_format: str = "auto") -> Config:
    """The model's shape as a Hugging Face config.json dictionary, without its weights.

    ``eos_token_id`` is always a list of all end tokens, empty when none is known.

    Raises:
        ModelLoadError: unreadable or unsupported; names the file and the reason.
    """
    _check_format(files, load_format)
    if files.kind is ModelKind.PRESET:
        return dict(files.preset or {})
    if files.kind is ModelKind.GGUF:
        from tiny_vllm.weights.gguf_config import hf_config_from_gguf, open_gguf

        return hf_config_from_gguf(open_gguf(files.location))
    from tiny_vllm.weights.hf_config import read_hf_config

    return read_hf_config(files.location)


def open_weights(files: ModelFiles, load_format: str = "auto") -> WeightSource:
    """Open the stored weights of a model; nothing is read before ``tensors()`` is iterated.

    Raises:
        ModelLoadError: a missing, truncated or unsupported file; also ``dummy``, which
            has no stored weights (see `dummy_tensors`).
    """
    _check_format(files, load_format)
    if load_format == "dummy":
        raise ModelLoadError(f"load_format='dummy' stores no weights for {files.name!r}")
    if files.kind is ModelKind.GGUF:
        from tiny_vllm.weights.gguf_tensors import GgufWeights

        return GgufWeights(files.location)
    from tiny_vllm.weights.safetensors_files import SafetensorsWeights

    return SafetensorsWeights(files.location)


def _check_format(files: ModelFiles, load_format: str) -> None:
    possible = _FORMATS[files.kind]
    if load_format in possible:
        return
    if files.kind is ModelKind.PRESET:
        raise ModelLoadError(
            f"{files.name!r} is only a shape, without weights: use --load-format dummy, "
            "or give the path of real weights"
        )
    raise ModelLoadError(
        f"load_format={load_format!r} cannot read {files.name!r} ({files.location}): "
        f"use one of {', '.join(possible)}"
    )
