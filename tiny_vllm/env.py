"""The environment switches of the reference, read in one place and typed.

`Switches` holds what was set; None means unset. A value that cannot be parsed is a
ConfigError. Flags override switches; which settings, from either, do nothing good on a
machine is said by `setting_notes`.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiny_vllm.errors import ConfigError

SWITCH_HELP = {
    "USE_PREFIX_CACHE": "0 or 1: reuse the KV cache of seen prefixes (`enable_prefix_caching`).",
    "CHUNKED_PREFILL": "0 or 1: split long prompts over steps (`enable_chunked_prefill`).",
    "USE_CUDA_GRAPH": "0 or 1: replay decode steps from CUDA graphs (`use_cuda_graph`).",
    "MAX_NEW_TOKENS_GENERATED": "Output limit in tokens; 0 = no cap, to EOS or `MAX_SEQ_LEN`.",
    "BATCH_SIZE": "Requests that run at the same time (`max_num_seqs`).",
    "MAX_PROMPT_LEN": "Longest prompt in tokens; a longer one is refused.",
    "MAX_SEQ_LEN": "Longest request, prompt and output (`max_model_len`).",
    "BLOCK_SIZE": "Tokens per KV-cache block (`block_size`).",
}


def _flag(environ: Mapping[str, str], name: str) -> bool | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r} cannot be parsed: use 0 or 1")
    return text == "1"


def _count(environ: Mapping[str, str], name: str, low: int) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise ConfigError(f"{name}={text!r} cannot be used: give a whole number >= {low}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Values of the reference's switches and constants; None = not set.

    ``max_new_tokens_generated`` of 0 means no cap: to EOS or ``max_seq_len``.
    """

    use_prefix_cache: bool | None = None
    chunked_prefill: bool | None = None
    use_cuda_graph: bool | None = None
    max_new_tokens_generated: int | None = None
    batch_size: int | None = None
    max_prompt_len: int | None = None
    max_seq_len: int | None = None
    block_size: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> "Switches":
        """Parse the environment.

        Raises:
            ConfigError: names the switch, its value and what it accepts.
        """
        env = os.environ if environ is None else environ
        return cls(
            use_prefix_cache=_flag(env, "USE_PREFIX_CACHE"),
            chunked_prefill=_flag(env, "CHUNKED_PREFILL"),
            use_cuda_graph=_flag(env, "USE_CUDA_GRAPH"),
            max_new_tokens_generated=_count(env, "MAX_NEW_TOKENS_GENERATED", 0),
            batch_size=_count(env, "BATCH_SIZE", 1),
            max_prompt_len=_count(env, "MAX_PROMPT_LEN", 1),
            max_seq_len=_count(env, "MAX_SEQ_LEN", 2),
            block_size=_count(env, "BLOCK_SIZE", 1),
        )

    def engine_settings(self) -> dict[str, int | bool]:
        """The switches as EngineConfig keys, only those that are set."""
        pairs = {
            "enable_prefix_caching": self.use_prefix_cache,
            "enable_chunked_prefill": self.chunked_prefill,
            "use_cuda_graph": self.use_cuda_graph,
            "max_num_seqs": self.batch_size,
            "max_model_len": self.max_seq_len,
            "block_size": self.block_size,
        }
        return {key: value for key, value in pairs.items() if value is not None}


# settings that only a GPU has a use for, as the caller wrote them
GPU_SETTINGS = {
    "use_cuda_graph": "USE_CUDA_GRAPH=1 (or --use-cuda-graph)",
    "async_scheduling": "--async-scheduling",
    "gpu_memory_utilization": "--gpu-memory-utilization",
}


def setting_notes(asked: Mapping[str, Any], device: str, used: Mapping[str, Any]) -> list[str]:
    """Sentences about settings that change nothing here, or make things worse.

    Args:
        asked: EngineConfig keys from switches and flags.
        used: the engine's own settings, with automatic ones made concrete.
    """
    notes = []
    for key, name in GPU_SETTINGS.items():
        if not asked.get(key):
            continue
        if not device.startswith("cuda"):
            notes.append(f"{name} has no effect on {device}: it needs a GPU")
        elif used.get(key) is False:
            notes.append(f"{name} has no effect on {device}: it needs the Triton backend")
    threads, cores = asked.get("num_threads"), len(usable_cpus())
    if threads is not None and threads > cores:
        notes.append(
            f"--num-threads {threads} is above the {cores} core(s) this process may use: threads "
            "that wait for each other are slow"
        )
    return notes


def usable_cpus() -> frozenset[int]:
    """Numbers of the processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(0)) if affinity else frozenset(range(os.cpu_count() or 1))


def missing_package(error: ModuleNotFoundError) -> str:
    """One line about a package that is not installed, and the way out."""
    return (
        f"the package {(error.name or str(error)).split('.')[0]} is not installed for "
        f"{sys.executable}: run `make setup` and use .venv/bin/python, or install it with "
        "`python -m pip install -e .` in the folder of the source"
    )
