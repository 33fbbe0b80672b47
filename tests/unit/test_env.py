"""Environment switches: parsed in one place, refused when they make no sense."""

import pytest

from tiny_vllm.config import EngineConfig
from tiny_vllm.env import SWITCH_HELP, Switches, setting_notes, usable_cpus
from tiny_vllm.errors import ConfigError

FLAGS = ("USE_PREFIX_CACHE", "CHUNKED_PREFILL", "USE_CUDA_GRAPH")
COUNTS = {
    "MAX_NEW_TOKENS_GENERATED": 0,
    "BATCH_SIZE": 1,
    "MAX_PROMPT_LEN": 1,
    "MAX_SEQ_LEN": 2,
    "BLOCK_SIZE": 1,
}


def test_nothing_set_is_nothing_said() -> None:
    assert Switches.read({}) == Switches()
    assert Switches().engine_settings() == {}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["yes", "true", "2", "-1", "01", "0.0"])
def test_a_flag_is_0_or_1(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='{value}' cannot be parsed: use 0 or 1"):
        Switches.read({name: value})


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_read(name: str) -> None:
    assert getattr(Switches.read({name: "1"}), name.lower()) is True
    assert getattr(Switches.read({name: " 0 "}), name.lower()) is False
    assert getattr(Switches.read({name: ""}), name.lower()) is None


@pytest.mark.parametrize(("name", "low"), COUNTS.items())
@pytest.mark.parametrize("value", ["many", "1.5", "1e3", "-7"])
def test_nonsense_counts_name_the_bound(name: str, low: int, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='{value}' .*whole number >= {low}"):
        Switches.read({name: value})


@pytest.mark.parametrize(("name", "low"), COUNTS.items())
def test_counts_have_a_lowest_value(name: str, low: int) -> None:
    assert getattr(Switches.read({name: str(low)}), name.lower()) == low
    with pytest.raises(ConfigError, match=f">= {low}"):
        Switches.read({name: str(low - 1)})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCK_SIZE", "48")
    assert Switches.read().block_size == 48


def test_engine_settings_are_engine_config_keys() -> None:
    environ = dict.fromkeys(FLAGS, "0") | dict.fromkeys(COUNTS, "9")
    settings = Switches.read(environ).engine_settings()
    assert settings == {
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "use_cuda_graph": False,
        "max_num_seqs": 9,
        "max_model_len": 9,
        "block_size": 9,
    }
    assert EngineConfig.create(**settings).max_num_seqs == 9


def test_a_setting_without_effect_is_reported() -> None:
    asked = Switches(use_cuda_graph=True).engine_settings()
    (note,) = setting_notes(asked, "cpu", {"use_cuda_graph": False})
    assert note == "USE_CUDA_GRAPH=1 (or --use-cuda-graph) has no effect on cpu: it needs a GPU"
    (note,) = setting_notes(asked, "cuda:0", {"use_cuda_graph": False})
    assert "has no effect on cuda:0: it needs the Triton backend" in note
    assert setting_notes(asked, "cuda:0", {"use_cuda_graph": True}) == []
    assert setting_notes({"use_cuda_graph": False}, "cpu", {}) == []


def test_more_threads_than_cores_are_reported() -> None:
    cores = len(usable_cpus())
    assert setting_notes({"num_threads": cores}, "cpu", {}) == []
    (note,) = setting_notes({"num_threads": cores + 1}, "cpu", {})
    assert f"--num-threads {cores + 1} is above the {cores} core(s)" in note


def test_every_switch_is_documented() -> None:
    assert [name.lower() for name in SWITCH_HELP] == list(Switches.__slots__)
