"""Each family from a tiny random config against transformers: prefill, then decode."""

import numpy as np
import pytest
import torch

from tiny_vllm.attention.metadata import AttentionBatch
from tiny_vllm.attention.torch_backend import TorchAttention
from tiny_vllm.errors import ModelLoadError
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.registry import parse_model_config
from tiny_vllm.models.weight_map import DecoderWeights, expected_tensors

transformers = pytest.importorskip("transformers")

BASE = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "llama3-rope": ("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": LINEAR_ROPE}),
    "llama-bias": ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 6}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "qwen3-tied": ("Qwen3ForCausalLM", "Qwen3Config", {"tie_word_embeddings": True}),
}


def build_pair(name):
    """A transformers model with random weights and our decoder holding the same ones."""
    architecture, config_name, extra = FAMILIES[name]
    hf_config = getattr(transformers, config_name)(
        **{**BASE, **extra}, attn_implementation="eager", dtype="float32"
    )
    torch.manual_seed(7)
    model = getattr(transformers, architecture)(hf_config).eval().float()
    for parameter in model.parameters():  # norms and biases away from one and zero
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    config = parse_model_config({**hf_config.to_dict(), "architectures": [architecture]})
    weights = DecoderWeights(config, torch.float32, torch.device("cpu"))
    weights.load((n, t) for n, t in model.state_dict().items())
    return model, Decoder(weights, 512)


def run(decoder, backend, token_ids, computed, table):
    """One row of a flat batch through the paged backend; logits of all its tokens."""
    batch = AttentionBatch(
        np.array([0, len(token_ids)]), np.array([computed]), np.array([table], dtype=np.int32)
    )
    attend, _ = backend.plan(batch)
    hidden = decoder.forward(torch.tensor(token_ids), torch.from_numpy(batch.positions()), attend)
    return decoder.logits(hidden)


def relative_error(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_transformers(name):
    """Prefill in two chunks and 40 decode steps; blocks lie scattered in the pool."""
    model, decoder = build_pair(name)
    rng = np.random.default_rng(3)
    token_ids = rng.integers(0, 256, 110).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([token_ids])).logits[0]
    backend = TorchAttention(decoder.config, 40, 8, torch.float32, torch.device("cpu"))
    table = rng.permutation(40)[:16]
    chunks = [slice(0, 37), slice(37, 70)] + [slice(i, i + 1) for i in range(70, 110)]
    ours = torch.cat([run(decoder, backend, token_ids[part], part.start, table) for part in chunks])
    assert relative_error(ours, theirs) <= 1e-4


def test_windows_hide_something():
    """The window cases above would pass emptily if nothing were hidden.

    Three layers of 24 tokens look back at most 3 x 23 positions.
    """
    _, decoder = build_pair("mistral-window")
    logits = []
    for first in (0, 99):
        backend = TorchAttention(decoder.config, 40, 8, torch.float32, torch.device("cpu"))
        logits.append(run(decoder, backend, [first, *range(1, 75)], 0, np.arange(10)))
    assert not torch.equal(logits[0][69], logits[1][69])
    assert torch.equal(logits[0][70:], logits[1][70:])


def _weights(config):
    return DecoderWeights(config, torch.float32, torch.device("cpu"))


def _tensors(config):
    return [(name, torch.zeros(shape)) for name, shape in expected_tensors(config).items()]


@pytest.fixture
def config():
    return parse_model_config({**BASE, "architectures": ["LlamaForCausalLM"]})


def test_missing_tensor_is_named(config):
    tensors = [t for t in _tensors(config) if t[0] != "model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj"):
        _weights(config).load(tensors)


def test_extra_tensor_is_named(config):
    with pytest.raises(ModelLoadError, match="model.surprise"):
        _weights(config).load([*_tensors(config), ("model.surprise", torch.zeros(1))])


def test_misshaped_tensor_is_named(config):
    tensors = [(n, t[:1] if n == "model.norm.weight" else t) for n, t in _tensors(config)]
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight.*\(1,\).*\(96,\)"):
        _weights(config).load(tensors)


def test_repeated_tensor_is_named(config):
    tensors = _tensors(config)
    with pytest.raises(ModelLoadError, match="twice"):
        _weights(config).load([*tensors, tensors[0]])


def test_derived_buffers_are_ignored(config):
    extra = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8))
    _weights(config).load([*_tensors(config), extra])


def test_unknown_architecture_names_the_nearest():
    with pytest.raises(ModelLoadError, match="LlamaForCausalLm .*did you mean LlamaForCausalLM"):
        parse_model_config({**BASE, "architectures": ["LlamaForCausalLm"]})


def test_unknown_rope_scaling_is_refused():
    with pytest.raises(ModelLoadError, match="yarn"):
        parse_model_config(
            {**BASE, "architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "yarn"}}
        )


def test_missing_config_key_is_named():
    config = {k: v for k, v in BASE.items() if k != "hidden_size"}
    with pytest.raises(ModelLoadError, match="hidden_size"):
        parse_model_config({**config, "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    "key", [k for k in BASE if k not in ("pad_token_id", "rms_norm_eps")] + ["rope_scaling"]
)
@pytest.mark.parametrize("value", ["x", -1, [1], {"rope_type": "linear", "factor": 0}])
def test_nonsense_values_are_load_errors(key, value):
    with pytest.raises(ModelLoadError):
        parse_model_config({**BASE, "architectures": ["LlamaForCausalLM"], key: value})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_size_of_zero_is_named(key):
    with pytest.raises(ModelLoadError, match="must be above 0"):
        parse_model_config({**BASE, "architectures": ["LlamaForCausalLM"], key: 0})


def test_an_odd_head_is_refused():
    with pytest.raises(ModelLoadError, match="head_dim=15"):
        parse_model_config({**BASE, "architectures": ["LlamaForCausalLM"], "head_dim": 15})


@pytest.mark.parametrize("names", [3, "LlamaForCausalLM", [3]])
def test_architectures_of_another_kind(names):
    with pytest.raises(ModelLoadError, match="architectures must be a list"):
        parse_model_config({**BASE, "architectures": names})
