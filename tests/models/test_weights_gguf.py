"""GGUF files: what a converter writes comes back under Hugging Face names, or a clear error.

`write_gguf` does what llama.cpp's converter does, row order of q and k included, so a
round trip checks names, shapes, order and values against tensors that never saw our code.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.hub import resolve_model
from tiny_vllm.weights import open_weights, read_config

HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 32, 40, 2
NAMES = {
    "self_attn.q_proj": ("attn_q", (HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.o_proj": ("attn_output", (HIDDEN, HEADS * HEAD_DIM)),
    "mlp.gate_proj": ("ffn_gate", (INTER, HIDDEN)),
    "mlp.up_proj": ("ffn_up", (INTER, HIDDEN)),
    "mlp.down_proj": ("ffn_down", (HIDDEN, INTER)),
    "input_layernorm": ("attn_norm", (HIDDEN,)),
    "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
}
# The rounding error as a share of the largest value: half a step (a whole one where the
# levels are not symmetric), and the float16 rounding of the scale.
QUANTISED = {
    Kind.Q8_0: 1 / 200,
    Kind.Q5_0: 1 / 15,
    Kind.Q5_1: 1 / 29,
    Kind.Q4_0: 1 / 7.5,
    Kind.Q4_1: 1 / 14,
}


def hf_tensors(arch: str, tied: bool = True) -> dict[str, np.ndarray]:
    """Random tensors under Hugging Face names."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": shape for name, (_, shape) in NAMES.items()}
        if arch == "qwen2":
            for part in "qkv":
                name = f"self_attn.{part}_proj"
                shapes[f"{prefix}{name}.bias"] = NAMES[name][1][:1]
        if arch == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (HEAD_DIM,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (HEAD_DIM,)
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(s, dtype=np.float32) for name, s in shapes.items()}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    parts = {hf: ours for hf, (ours, _) in NAMES.items()}
    parts |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    return f"blk.{layer}.{parts[part]}.{kind}"


def converter_rows(name: str, tensor: np.ndarray) -> np.ndarray:
    """llama.cpp's order: dimension i beside dimension i + head_dim / 2, in every head."""
    heads = HEADS if ".q_proj." in name else KV_HEADS
    order = [
        head * HEAD_DIM + half * HEAD_DIM // 2 + i
        for head in range(heads)
        for i in range(HEAD_DIM // 2)
        for half in range(2)
    ]
    return tensor[order]


def metadata(arch: str) -> dict[str, int | float]:
    return {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }


def write_gguf(
    path: Path,
    arch: str = "llama",
    kind: Kind = Kind.F32,
    tensors: dict[str, np.ndarray] | None = None,
    extra: dict[str, object] | None = None,
    raw: dict[str, tuple[np.ndarray, Kind]] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**metadata(arch), **(extra or {})}.items():
        full = key if key.startswith(("tokenizer.", "split.")) else f"{arch}.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(full, value)
    for name, tensor in (hf_tensors(arch) if tensors is None else tensors).items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = converter_rows(name, tensor)
        stored = kind if tensor.ndim > 1 else Kind.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor, stored), raw_dtype=stored)
    for name, (data, stored) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    return dict(open_weights(resolve_model(str(path))).tensors())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_round_trip_is_exact_in_float32(tmp_path, arch, tied):
    expected = hf_tensors(arch, tied)
    path = write_gguf(tmp_path / "m.gguf", arch, tensors=expected)
    found = read(path)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        np.testing.assert_array_equal(found[name].numpy(), tensor, err_msg=name)
    config = read_config(resolve_model(str(path)))
    assert config["tie_word_embeddings"] is tied
    assert config["vocab_size"] == VOCAB
    assert config["attention_bias"] is (arch == "qwen2")
    assert config["rms_norm_eps"] == 1e-5
    assert (config["head_dim"], config["torch_dtype"]) == (HEAD_DIM, "float32")


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, "float16"), (Kind.BF16, "bfloat16")])
def test_half_precision_is_yielded_as_stored(tmp_path, kind, dtype):
    expected = hf_tensors("llama")
    path = write_gguf(tmp_path / "m.gguf", kind=kind, tensors=expected)
    assert read_config(resolve_model(str(path)))["torch_dtype"] == dtype
    for name, tensor in read(path).items():
        wanted = torch.from_numpy(expected[name])
        stored = getattr(torch, dtype) if wanted.ndim > 1 else torch.float32
        assert tensor.dtype == stored
        assert torch.equal(tensor, wanted.to(stored)), name


@pytest.mark.parametrize("slice_bytes", [1, 4 << 20])
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_tensors_are_restored(tmp_path, monkeypatch, kind, slice_bytes):
    """Whole tensors and single rows at a time give the same, close to the original."""
    monkeypatch.setattr("tiny_vllm.weights.gguf_tensors._SLICE_BYTES", slice_bytes)
    expected = hf_tensors("llama")
    for name, tensor in read(write_gguf(tmp_path / "m.gguf", kind=kind)).items():
        assert tensor.dtype == torch.float32
        wanted = expected[name]
        if wanted.ndim > 1:
            error = np.abs(tensor.numpy() - wanted).max() / np.abs(wanted).max()
            assert error < QUANTISED[kind], name
            wanted = gguf.dequantize(gguf.quants.quantize(wanted, kind), kind)
        np.testing.assert_array_equal(tensor.numpy(), wanted, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_agree_with_the_gguf_package(tmp_path, kind):
    """The package cannot write these: blocks of random bytes, small enough to be finite."""
    rows, cols = 5, 512
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 0x3C, (rows, cols // block * size), dtype=np.uint8)
    tensors = hf_tensors("llama")
    del tensors["model.embed_tokens.weight"]
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, raw={"token_embd.weight": (raw, kind)})
    found = read(path)["model.embed_tokens.weight"]
    assert found.shape == (rows, cols)
    assert found.count_nonzero() > 0
    np.testing.assert_array_equal(found.numpy(), gguf.dequantize(raw, kind))


def test_unsupported_storage_type_is_named(tmp_path):
    raw = {"token_embd.weight": (np.zeros((4, 66), dtype=np.uint8), Kind.IQ2_XXS)}
    tensors = hf_tensors("llama")
    del tensors["model.embed_tokens.weight"]
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, raw=raw)
    with pytest.raises(ModelLoadError, match=r"'token_embd.weight' is stored as IQ2_XXS.*Q4_K"):
        open_weights(resolve_model(str(path)))


def test_a_second_iteration_reads_again(tmp_path):
    source = open_weights(resolve_model(str(write_gguf(tmp_path / "m.gguf"))))
    first = dict(source.tensors())
    first["model.norm.weight"].zero_()
    assert dict(source.tensors())["model.norm.weight"].count_nonzero() == HIDDEN


def test_unknown_architecture_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "mamba", tensors={})
    with pytest.raises(ModelLoadError, match="'mamba'; supported are llama, qwen2, qwen3"):
        read_config(resolve_model(str(path)))


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_cut_file_is_an_error_with_both_sizes(tmp_path, fraction):
    path = write_gguf(tmp_path / "whole.gguf")
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf") as caught:
        read_config(resolve_model(str(cut)))
    assert str(cut.stat().st_size) in str(caught.value)
    if fraction >= 0.5:
        assert str(len(data) - len(data) % 4) in str(caught.value)


def test_file_that_shrinks_after_opening_is_an_error(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    source = open_weights(resolve_model(str(path)))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=r"m\.gguf is truncated in tensor"):
        list(source.tensors())


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [(0, b"GGML", "no GGUF file"), (4, b"\x09\0\0\0", "version 9"), (16, b"\xff" * 8, "truncated")],
)
def test_damaged_header(tmp_path, position, value, reason):
    path = write_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[position : position + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*{reason}"):
        read_config(resolve_model(str(path)))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"expert_count": 8}, "mixture of experts"),
        ({"attention.value_length": 16}, "values of 16"),
        ({"rope.dimension_count": 16}, "16 of 32 dimensions"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "'yarn'"),
        ({"attention.head_count_kv": [2, 4]}, "head_count_kv is"),
        ({"context_length": 0}, "context_length is 0"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_the_decoder_cannot_do_is_an_error(tmp_path, extra, reason):
    path = write_gguf(tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelLoadError, match=reason):
        read_config(resolve_model(str(path)))


def test_tensor_without_a_place_is_named(tmp_path):
    raw = {"blk.0.ffn_gate_inp.weight": (np.zeros((2, 64), dtype=np.float32), Kind.F32)}
    path = write_gguf(tmp_path / "m.gguf", raw=raw)
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        open_weights(resolve_model(str(path)))


def test_sliding_window_makes_a_mistral(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", extra={"attention.sliding_window": 16})
    config = read_config(resolve_model(str(path)))
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 16


def test_eos_ids_declared_and_known_by_text(tmp_path):
    extra = {
        "tokenizer.ggml.tokens": ["a", "<|endoftext|>", "<|im_end|>", "<|eot_id|>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1],  # the last one is ordinary text
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 0,
    }
    config = read_config(resolve_model(str(write_gguf(tmp_path / "m.gguf", extra=extra))))
    assert config["eos_token_id"] == [2, 1]
    assert config["bos_token_id"] == 0


def test_linear_rope_scaling(tmp_path):
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    config = read_config(resolve_model(str(write_gguf(tmp_path / "m.gguf", extra=extra))))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def llama3_inverse_frequencies(scaling: dict[str, float], theta: float) -> np.ndarray:
    """transformers' own definition, the opponent of ours."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return frequencies.double().numpy()


@pytest.mark.parametrize(
    ("factor", "low", "high", "original", "theta"),
    [
        (8.0, 1.0, 4.0, 8192, 500000.0),
        (32.0, 1.0, 4.0, 8192, 500000.0),
        (16.0, 1.0, 8.0, 4096, 10000.0),  # solved for, not looked up
        (2.0, 1.0, 3.0, 1000, 10000.0),
    ],
)
def test_rope_factors_give_llama3_scaling_back(tmp_path, factor, low, high, original, theta):
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    scaled = llama3_inverse_frequencies(scaling, theta)
    plain = theta ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    raw = {"rope_freqs.weight": ((plain / scaled).astype(np.float32), Kind.F32)}
    path = write_gguf(tmp_path / "m.gguf", extra={"rope.freq_base": theta}, raw=raw)
    found = read_config(resolve_model(str(path)))["rope_scaling"]
    assert found["rope_type"] == "llama3"
    assert found["factor"] == factor
    np.testing.assert_allclose(llama3_inverse_frequencies(found, theta), scaled, rtol=2e-4)
    assert "rope_freqs.weight" not in read(path)


def test_rope_factors_of_another_kind_are_refused(tmp_path):
    factors = np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)
    raw = {"rope_freqs.weight": (factors, Kind.F32)}
    path = write_gguf(tmp_path / "m.gguf", raw=raw)
    with pytest.raises(ModelLoadError, match="follow no llama3 scaling"):
        read_config(resolve_model(str(path)))


def test_rope_factors_of_one_change_nothing(tmp_path):
    raw = {"rope_freqs.weight": (np.ones(HEAD_DIM // 2, dtype=np.float32), Kind.F32)}
    config = read_config(resolve_model(str(write_gguf(tmp_path / "m.gguf", raw=raw))))
    assert config["rope_scaling"] is None
