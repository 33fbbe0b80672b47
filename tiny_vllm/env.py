"""The environment switches of the reference, read in one place and typed.

`Switches` holds what was set; None means unset. A value that cannot be parsed is a
ConfigError. Flags override switches; which of them has no effect on a device is
reported by `ineffective`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

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

    def ineffective(self, device: str) -> list[str]:
        """Sentences about switches that change nothing on this device."""
        if not self.use_cuda_graph:
            return []
        why = "not implemented yet" if device.startswith("cuda") else "CUDA graphs need a GPU"
        return [f"USE_CUDA_GRAPH=1 has no effect on {device}: {why}"]
