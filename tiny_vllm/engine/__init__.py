"""The engine: scheduler and runner joined (`ExtendedEngine`), and the `LLM` front end."""

from tiny_vllm.engine.extended import ExtendedEngine
from tiny_vllm.engine.llm import LLM

__all__ = ["LLM", "ExtendedEngine"]
