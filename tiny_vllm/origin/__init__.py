"""The baseline engine: the fair opponent of the benchmark and the oracle of the tests."""

from tiny_vllm.origin.engine import OriginEngine

__all__ = ["OriginEngine"]
