"""tiny_vllm: LLM inference for long shared prefixes.

Owns the public names. Importing the package loads no torch: `LLM` is resolved on first use.
"""

from typing import TYPE_CHECKING, Any

from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    RequestTooLongError,
    TinyVllmError,
    TraceError,
)
from tiny_vllm.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from tiny_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.engine.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "FinishReason",
    "InvalidRequestError",
    "Logprob",
    "ModelLoadError",
    "RequestMetrics",
    "RequestOutput",
    "RequestTooLongError",
    "SamplingParams",
    "TinyVllmError",
    "TraceError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tiny_vllm.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'tiny_vllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
