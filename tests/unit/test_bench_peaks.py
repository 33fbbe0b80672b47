"""The cache of measured peaks: it only rises, and a damaged one is no error."""

from pathlib import Path

import pytest

from tiny_vllm.bench.peaks_cache import cache_file, peaks_key, read_cached, write_cached
from tiny_vllm.metrics import Peaks

KEY = peaks_key("a processor", "2.13", "float32", 2)


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_written_is_read() -> None:
    assert read_cached(KEY) is None
    write_cached(KEY, Peaks(1.0, 2.0, 3))
    assert read_cached(KEY) == Peaks(1.0, 2.0, 3)
    assert read_cached(peaks_key("a processor", "2.13", "bfloat16", 2)) is None


def test_a_peak_can_only_rise() -> None:
    write_cached(KEY, Peaks(5.0, 2.0, 3))
    assert write_cached(KEY, Peaks(4.0, 7.0, 3)) == Peaks(5.0, 7.0, 3)
    assert read_cached(KEY) == Peaks(5.0, 7.0, 3)


@pytest.mark.parametrize(
    "text", ["{", "[]", pytest.param("[" * 100_000, id="deep"), f'{{"{KEY}": {{"speed": 1}}}}']
)
def test_a_damaged_cache_is_measured_anew(text: str) -> None:
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(text)
    assert read_cached(KEY) is None
    write_cached(KEY, Peaks(1.0, 2.0))
    assert read_cached(KEY) == Peaks(1.0, 2.0)


def test_a_cache_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert write_cached(KEY, Peaks(1.0, 2.0)) == Peaks(1.0, 2.0)
    assert read_cached(KEY) is None


def test_the_fallback_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file() == tmp_path / ".cache" / "tiny_vllm" / "peaks.json"
