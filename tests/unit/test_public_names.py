"""The names that programs import, and that importing them costs nothing."""

import subprocess
import sys

import pytest

import tiny_vllm

PUBLIC = {
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
}


def test_all_is_what_we_promise() -> None:
    assert set(tiny_vllm.__all__) == PUBLIC
    assert len(tiny_vllm.__all__) == len(PUBLIC)
    assert set(dir(tiny_vllm)) == PUBLIC


def test_every_name_resolves() -> None:
    for name in tiny_vllm.__all__:
        assert getattr(tiny_vllm, name) is not None
    assert tiny_vllm.LLM.__module__ == "tiny_vllm.engine.llm"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Lllm'"):
        tiny_vllm.Lllm  # type: ignore[attr-defined]  # noqa: B018


def test_errors_are_one_tree() -> None:
    errors = [getattr(tiny_vllm, name) for name in PUBLIC if name.endswith("Error")]
    assert all(issubclass(error, tiny_vllm.TinyVllmError) for error in errors)


def test_the_package_loads_without_torch() -> None:
    code = "import sys, tiny_vllm; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
