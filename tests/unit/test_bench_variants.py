"""The syntax of --variants and its errors."""

import pytest

from tiny_vllm.bench.variants import Variant, parse_variants
from tiny_vllm.errors import ConfigError


def test_built_in_names() -> None:
    variants = parse_variants(["origin,extended", "no-prefix-cache"])
    assert [(v.name, v.engine) for v in variants] == [
        ("origin", "origin"),
        ("extended", "extended"),
        ("no-prefix-cache", "extended"),
    ]
    assert variants[2].config({"block_size": 16}).enable_prefix_caching is False


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("no-chunked-prefill", "enable_chunked_prefill", False),
        ("no-cuda-graph", "use_cuda_graph", False),
        ("per-request-attention", "attention", "per-request"),
    ],
)
def test_each_built_in_changes_one_setting(name: str, key: str, value: object) -> None:
    (variant,) = parse_variants([name])
    assert variant.changes == {key: value}
    assert getattr(variant.config({}), key) == value


def test_own_variants_with_several_changes() -> None:
    text = "extended,small=block_size:16,gpu_memory_utilization:0.5;one=engine:origin"
    _, small, one = parse_variants([text + ",max_num_seqs:1"])
    assert small == Variant("small", "extended", {"block_size": 16, "gpu_memory_utilization": 0.5})
    assert one == Variant("one", "origin", {"max_num_seqs": 1})
    assert small.config({"block_size": 32}).block_size == 16


def test_values_have_types() -> None:
    (v,) = parse_variants(["x=use_cuda_graph:false,block_size:auto,dtype:auto,device:cuda:1"])
    assert v.changes == {
        "use_cuda_graph": False,
        "block_size": None,
        "dtype": "auto",
        "device": "cuda:1",
    }


def test_a_variant_without_changes_measures_the_noise() -> None:
    extended, again = parse_variants(["extended,again="])
    assert again.config({}) == extended.config({})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("orign", "unknown variant 'orign'; did you mean 'origin'"),
        ("zzz", "built in: extended, origin"),
        ("", "no variant given"),
        (" , ;", "no variant given"),
        ("origin,origin", "'origin' is given twice"),
        ("block_size:16", "belongs to no variant"),
        ("extended,block_size:16", "belongs to no variant"),
        ("extended=block_size:16", "variant name 'extended' cannot be used"),
        ("a b=block_size:16", "variant name 'a b' cannot be used"),
        ("x=block_size", "variant 'x': 'block_size' is not key:value"),
        ("x=block_size:", "is not key:value"),
        ("x=engine:vllm", "engine 'vllm' is not one of extended, origin"),
        ("x=model:other", "'model' is the same for all variants"),
    ],
)
def test_bad_syntax_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_variants([text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x=blok_size:16", "variant 'x': unknown EngineConfig key 'blok_size'; did you mean"),
        ("x=block_size:0", "variant 'x': block_size=0 must be"),
        ("x=attention:magic", "variant 'x': attention='magic' is not one of"),
    ],
)
def test_bad_settings_name_variant_and_key(text: str, message: str) -> None:
    (variant,) = parse_variants([text])
    with pytest.raises(ConfigError, match=message):
        variant.config({})
