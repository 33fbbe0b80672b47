"""Configuration: unknown keys, bounds, and what `resolve` makes of "auto"."""

import dataclasses

import pytest

from tiny_vllm.config import (
    SWITCHES,
    EngineConfig,
    HostFacts,
    ModelConfig,
    from_mapping,
    resolve,
)
from tiny_vllm.errors import ConfigError

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    dtype="bfloat16",
)
CPU = HostFacts(num_cores=2, available_memory_bytes=8 << 30)
CPU_BF16 = HostFacts(cpu_bf16=True, num_cores=2)
GPU = HostFacts(has_cuda=True, cuda_reason="", num_cores=16)


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'max_num_seq'.*did you mean 'max_num_seqs'"):
        EngineConfig.create(max_num_seq=4)


def test_unknown_key_without_neighbour_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'zzz'; known: model, tokenizer"):
        EngineConfig.create(zzz=1)


def test_unknown_key_of_a_model_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="did you mean 'head_dim'"):
        from_mapping(ModelConfig, {"head_dims": 3})


@pytest.mark.parametrize(
    "name",
    [
        "max_model_len",
        "block_size",
        "num_blocks",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_threads",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_counts_are_whole_and_positive(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value!r} must be a whole number >= 1"):
        EngineConfig.create(**{name: value})
    assert getattr(EngineConfig.create(**{name: 1}), name) == 1


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("dtype", "bfloat", "bfloat16"),
        ("load_format", "ggfu", "gguf"),
        ("device", "cudda", "cuda"),
        ("attention", "forrest", "forest"),
        ("schedule", "fcf", "fcfs"),
    ],
)
def test_choices_name_the_nearest(name: str, value: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='{value}' is not one of .*mean '{near}'"):
        EngineConfig.create(**{name: value})


@pytest.mark.parametrize("value", [0.0, 0.04, 1.01, -1.0])
def test_gpu_memory_utilization_bounds(value: float) -> None:
    with pytest.raises(ConfigError, match=rf"gpu_memory_utilization={value} .*\[0.05, 1.0\]"):
        EngineConfig.create(gpu_memory_utilization=value)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, "no", None])
def test_switches_are_true_or_false(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value!r} must be True or False"):
        EngineConfig.create(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("device", 5, "not one of"),
        ("device", "cpu:0", "give auto, cpu, cuda or cuda:N"),
        ("device", "cuda:", "give auto, cpu, cuda or cuda:N"),
        ("device", "cuda:x", "give auto, cpu, cuda or cuda:N"),
        ("gpu_memory_utilization", "x", "must be a number in"),
        ("gpu_memory_utilization", float("nan"), "must be a number in"),
        ("seed", "x", "whole number"),
        ("seed", 1.5, "whole number"),
        ("num_threads", 10**9, "at most 1024"),
        ("model", None, "must be text"),
        ("tokenizer", 5, "must be text"),
        ("revision", 5, "must be text"),
    ],
)
def test_values_of_another_kind_are_refused(name: str, value: object, part: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*{part}"):
        EngineConfig.create(**{name: value})


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices_that_are_understood(device: str) -> None:
    assert EngineConfig(device=device).device == device


@pytest.mark.parametrize("name", ["num_blocks", "kv_cache_memory_bytes"])
def test_a_pool_beyond_the_memory_names_both_sizes(name: str) -> None:
    config = EngineConfig.create(**{name: 10**18})
    with pytest.raises(ConfigError, match=rf"{name}=10+ asks for .* {8 << 30} bytes .* free"):
        resolve(config, MODEL, CPU)


def test_config_is_frozen_and_replace_checks_again() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 3  # type: ignore[misc]
    with pytest.raises(ConfigError, match="block_size=0"):
        config.replace(block_size=0)
    assert config.replace(block_size=16).block_size == 16


def test_to_dict_rebuilds_the_config() -> None:
    config = EngineConfig(block_size=16, max_num_seqs=3)
    values = config.to_dict()
    assert "reasons" not in values
    assert EngineConfig.create(**values) == config


def test_everything_automatic_becomes_concrete_with_a_reason() -> None:
    config = resolve(EngineConfig(), MODEL, CPU)
    assert config.device == "cpu"
    assert config.dtype == "float32"
    assert config.max_model_len == 2048
    for name, value in config.to_dict().items():
        if name in ("tokenizer", "revision", "load_format"):
            continue  # settled by the loader, which reads the files
        assert value not in (None, "auto"), name
    for name in ("device", "dtype", "max_model_len", "block_size", "num_blocks", "max_num_seqs"):
        assert config.reasons[name], name


def test_a_given_value_is_kept_and_said_to_be_given() -> None:
    config = resolve(EngineConfig(block_size=7, dtype="bfloat16"), MODEL, CPU)
    assert (config.block_size, config.dtype) == (7, "bfloat16")
    assert config.reasons["block_size"] == config.reasons["dtype"] == "set by the user"


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(EngineConfig(), MODEL, CPU)
    assert resolve(once, MODEL, CPU) == once


@pytest.mark.parametrize(
    ("host", "model_dtype", "expected"),
    [
        (CPU, "bfloat16", "float32"),
        (CPU_BF16, "float16", "bfloat16"),
        (GPU, "float16", "float16"),
        (GPU, "float32", "bfloat16"),
    ],
)
def test_automatic_dtype(host: HostFacts, model_dtype: str, expected: str) -> None:
    model = dataclasses.replace(MODEL, dtype=model_dtype)
    assert resolve(EngineConfig(), model, host).dtype == expected


def test_cuda_is_taken_when_usable_and_refused_with_the_cause_when_not() -> None:
    assert resolve(EngineConfig(), MODEL, GPU).device == "cuda"
    broken = HostFacts(cuda_reason="the driver is too old")
    with pytest.raises(ConfigError, match=r"'cuda:1'.*the driver is too old.*--device cpu"):
        resolve(EngineConfig(device="cuda:1"), MODEL, broken)


def test_cuda_graphs_are_said_to_have_no_effect_on_cpu() -> None:
    config = resolve(EngineConfig(), MODEL, CPU)
    assert config.use_cuda_graph is False
    assert "no effect on cpu" in config.reasons["use_cuda_graph"]
    on_gpu = resolve(EngineConfig(), MODEL, GPU)
    assert on_gpu.use_cuda_graph is False
    assert "without the Triton backend" in on_gpu.reasons["use_cuda_graph"]
    kernels = resolve(EngineConfig(), MODEL, dataclasses.replace(GPU, triton_fault=None))
    assert kernels.attention_backend == "triton"
    assert kernels.use_cuda_graph is True and kernels.async_scheduling is True


def test_max_model_len_above_the_model_names_both() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=4096 .*max_position_embeddings=2048"):
        resolve(EngineConfig(max_model_len=4096), MODEL, CPU)


def test_whole_prompts_must_fit_a_step_without_chunked_prefill() -> None:
    off = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=512)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=512 .*max_model_len=2048"):
        resolve(off, MODEL, CPU)
    assert resolve(off.replace(max_model_len=512), MODEL, CPU).max_num_batched_tokens == 512
    automatic = resolve(EngineConfig(enable_chunked_prefill=False), MODEL, CPU)
    assert automatic.max_num_batched_tokens == 2048
    assert "whole prompts" in automatic.reasons["max_num_batched_tokens"]


def test_blocks_follow_from_the_memory() -> None:
    # fp32: 2 (K, V) x 2 layers x 2 heads x 16 x 4 bytes = 512 bytes a token, 8192 a block of 16
    config = EngineConfig(block_size=16, kv_cache_memory_bytes=100 * 8192 + 8191)
    assert resolve(config, MODEL, CPU).num_blocks == 100


def test_memory_below_one_block_names_both() -> None:
    config = EngineConfig(block_size=16, kv_cache_memory_bytes=8191)
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes=8191 .*16 tokens needs 8192"):
        resolve(config, MODEL, CPU)


def test_gpu_blocks_are_left_to_the_worker() -> None:
    assert resolve(EngineConfig(), MODEL, GPU).num_blocks is None


def test_layer_window() -> None:
    model = dataclasses.replace(MODEL, sliding_window=128, num_full_attention_layers=1)
    assert [model.layer_window(layer) for layer in range(2)] == [None, 128]
