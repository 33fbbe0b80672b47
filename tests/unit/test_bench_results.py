"""Ratios of the summary: only equal work is compared."""

import pytest

from tiny_vllm.bench.results import _speedup


@pytest.mark.parametrize(
    ("failed", "generated", "expected"), [(0, 100, 4.0), (1, 100, None), (0, 10, None)]
)
def test_refused_requests_are_no_speedup(failed, generated, expected):
    base = {"wall_s": 8.0, "failed": 0, "generated_tokens": 100}
    other = {"wall_s": 2.0, "failed": failed, "generated_tokens": generated}
    assert _speedup(base, other) == expected
