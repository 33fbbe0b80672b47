"""Tokenizers built from GGUF metadata, against slow ones written here from the definitions.

The vocabularies are tiny: a BPE trained on a few lines, a SentencePiece one by hand.
"""

import json
import unicodedata
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.hub import resolve_model
from tiny_vllm.tokenizer import Tokenizer, load_tokenizer
from tiny_vllm.tokenizer.pieces import byte_alphabet

regex = pytest.importorskip("regex")

CORPUS = [
    "the cat can't see the 2026 cats, they're THEY'RE gone; it's 123456 12 345",
    "  indented    text\n\n\nnew lines\r\n and tabs\t\tend   ",
    "éàü naïve café 你好世界 你好 🎉🎉 ½ ² Ⅷ ٣٤",
] * 4
TEXTS = [
    "",
    " ",
    "2026",
    "1234567 12 1",
    "the cats can't THEY'RE it's",
    "a  b   c    ",
    "x\n\n y\r\n\r\nz\t\t",
    "hello,world!! (yes) -- ok...\n",
    "naïve café 你好，世界 🎉👩‍👩‍👧",
    "½ ² Ⅷ ٣٤ 3.14",
    "e\u0301 composed e\u0301e\u0301",
    "<|end|>the<|end|>",
    "a qzq qzqs",
    " leading 1 and trailing 1 ",
]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# As published with Llama 3 and Qwen 2.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
SPECIAL = "<|end|>"


def train() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level BPE."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=6,
    )
    backend.train_from_iterator([w for line in CORPUS for w in regex.findall(GPT2, line)], trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens.append("Ġqzq")  # no merges lead to it: only taking whole words finds it
    return tokens, [" ".join(pair) for pair in model["merges"]]


TOKENS, MERGES = train()


def write_vocabulary(path: Path, tokens: list[str], types: list[int], **keys) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", types)
    for key, value in keys.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        add = {int: writer.add_uint32, str: writer.add_string, bool: writer.add_bool}
        add.get(type(value), writer.add_array)(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(path: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(path)))


def byte_level(path: Path, **keys) -> Tokenizer:
    keys = {"model": "gpt2", "merges": MERGES, "eos_token_id": len(TOKENS), **keys}
    types = [1] * len(TOKENS) + [3]
    return load(write_vocabulary(path / "m.gguf", [*TOKENS, SPECIAL], types, **keys))


class SlowBpe:
    """Byte-level BPE by the book: merge the best-ranked pair until none is left."""

    def __init__(self, pattern: str, digits: bool, nfc: bool, whole: bool) -> None:
        self.pattern, self.digits, self.nfc, self.whole = pattern, digits, nfc, whole
        self.ids = {token: i for i, token in enumerate([*TOKENS, SPECIAL])}
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(MERGES)}
        self.characters = {byte: character for character, byte in byte_alphabet().items()}

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in regex.split(f"({regex.escape(SPECIAL)})", text):
            ids += [self.ids[SPECIAL]] if part == SPECIAL else self.encode_plain(part)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        pieces = regex.findall(r"\p{N}|\P{N}+", text) if self.digits else [text]
        words = [word for piece in pieces for word in regex.findall(self.pattern, piece)]
        return [token_id for word in words for token_id in self.merge(word)]

    def merge(self, word: str) -> list[int]:
        parts = [self.characters[byte] for byte in word.encode()]
        if self.whole and "".join(parts) in self.ids:
            return [self.ids["".join(parts)]]
        while True:
            pairs = list(zip(parts, parts[1:], strict=False))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 10**9), default=None)
            if best not in self.ranks:
                return [self.ids[part] for part in parts]
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]


SLOW = {
    "gpt-2": SlowBpe(GPT2, digits=False, nfc=False, whole=False),
    "default": SlowBpe(GPT2, digits=False, nfc=False, whole=False),
    "smollm": SlowBpe(GPT2, digits=True, nfc=False, whole=False),
    "llama-bpe": SlowBpe(LLAMA3, digits=False, nfc=False, whole=True),
    "qwen2": SlowBpe(QWEN2, digits=False, nfc=True, whole=False),
}


@pytest.fixture(scope="module")
def byte_level_tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    return {
        pre: byte_level(tmp_path_factory.mktemp(pre), pre=pre, add_bos_token=False) for pre in SLOW
    }


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", SLOW)
def test_encode_agrees_with_the_slow_one(byte_level_tokenizers, pre, text):
    tokenizer = byte_level_tokenizers[pre]
    ids = tokenizer.encode(text)
    assert ids == SLOW[pre].encode(text)
    shown = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(ids, skip_special_tokens=False) == shown
    assert tokenizer.decode(ids) == shown.replace(SPECIAL, "")


@settings(deadline=None, max_examples=150)
@given(text=st.text(alphabet="th can'S12３½é你🎉e\u0301 \n\r\t.,<|", max_size=30))
@pytest.mark.parametrize("pre", SLOW)
def test_encode_agrees_on_random_text(byte_level_tokenizers, pre, text):
    assert byte_level_tokenizers[pre].encode(text) == SLOW[pre].encode(text)


def test_pre_tokenizers_differ_where_they_should(byte_level_tokenizers):
    """The reference above would hide a split that is never used; these counts would not."""
    texts = {pre: byte_level_tokenizers[pre].encode("1234567") for pre in SLOW}
    assert len(texts["smollm"]) == len(texts["qwen2"]) == 7
    assert len(texts["gpt-2"]) < len(texts["llama-bpe"]) < 7


@pytest.mark.parametrize(
    ("pre", "keys", "adds"),
    [
        ("smollm", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_bos(tmp_path, pre, keys, adds):
    tokenizer = byte_level(tmp_path, pre=pre, bos_token_id=len(TOKENS), **keys)
    plain = tokenizer.encode("cats", add_special_tokens=False)
    assert tokenizer.encode("cats") == ([len(TOKENS)] if adds else []) + plain
    assert tokenizer.bos_token_id == len(TOKENS)


def test_eos_may_be_added_too(tmp_path):
    tokenizer = byte_level(tmp_path, pre="gpt-2", add_eos_token=True)
    assert tokenizer.encode("cats")[-1] == len(TOKENS) == tokenizer.eos_token_ids[0]


def test_user_defined_tokens_are_matched_but_not_special(tmp_path):
    path = write_vocabulary(
        tmp_path / "m.gguf",
        [*TOKENS, "<tool>"],
        [1] * len(TOKENS) + [4],
        model="gpt2",
        pre="gpt-2",
        merges=MERGES,
    )
    tokenizer = load(path)
    assert len(TOKENS) in tokenizer.encode("the <tool> cats")
    assert tokenizer.special_ids == frozenset()
    assert tokenizer.decode([len(TOKENS)]) == "<tool>"


def test_chat_template_knows_the_special_tokens(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer = byte_level(tmp_path, pre="gpt-2", chat_template=template)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == f"hi{SPECIAL}"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"pre": "mystery"}, "pre-tokenizer 'mystery'.*known are gpt-2"),
        ({"model": "t5"}, "'t5'; supported are gpt2 and llama"),
        ({"pre": "gpt-2", "merges": ["a b c"]}, "merges do not fit"),
        ({"pre": "gpt-2", "merges": ["zz qq"]}, "merges do not fit"),
        ({"pre": "gpt-2", "bos_token_id": 10**6, "add_bos_token": True}, "bos_token_id=1000000"),
        ({"model": "llama", "scores": [0.0]}, "1 scores for"),
    ],
)
def test_faults_name_file_and_value(tmp_path, keys, reason):
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*{reason}"):
        byte_level(tmp_path, **keys)


def test_file_without_vocabulary(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert not resolve_model(str(path)).has_tokenizer
    with pytest.raises(ModelLoadError, match="holds no tokenizer"):
        load(path)


# --- SentencePiece ----------------------------------------------------------

PIECES = "▁ t h e c a ▁t he ▁the ▁c at ▁cat s ▁▁ th hes é 1 11 < 0 x 4 > <0 x4 <0x4 1>".split()
SP_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SP_TOKENS = ["<unk>", "<s>", "</s>", *SP_BYTES, *PIECES]
SP_TYPES = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
SP_SCORES = {piece: -float(rank) for rank, piece in enumerate(reversed(PIECES))}


def sentencepiece(path: Path, **keys) -> Tokenizer:
    scores = [SP_SCORES.get(token, 0.0) for token in SP_TOKENS]
    keys = {"model": "llama", "scores": scores, "bos_token_id": 1, "eos_token_id": 2, **keys}
    keys.setdefault("unknown_token_id", 0)
    return load(write_vocabulary(path / "m.gguf", SP_TOKENS, SP_TYPES, **keys))


def slow_sentencepiece(text: str, prefix: bool) -> list[int]:
    """Join the adjacent pair whose piece scores best, the leftmost of equals, to the end."""
    parts = list((("▁" if prefix and text else "") + text).replace(" ", "▁"))
    while True:
        pairs = [left + right for left, right in zip(parts, parts[1:], strict=False)]
        best = max(pairs, key=lambda pair: SP_SCORES.get(pair, -1e9), default=None)
        if best not in SP_SCORES:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [best]
    ids = {token: index for index, token in enumerate(SP_TOKENS)}
    found = []
    for part in parts:
        found += [ids[part]] if part in SP_SCORES else [ids[SP_BYTES[b]] for b in part.encode()]
    return found


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def sp_tokenizer(request, tmp_path_factory) -> tuple[Tokenizer, bool]:
    folder = tmp_path_factory.mktemp("sp")
    return sentencepiece(folder, add_space_prefix=request.param), request.param


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet="thecats é1你🎉\n", max_size=20))
def test_sentencepiece_agrees_with_the_slow_one(sp_tokenizer, text):
    tokenizer, prefix = sp_tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == slow_sentencepiece(text, prefix)
    assert tokenizer.decode(ids) == text


def test_byte_piece_written_out_is_text(tmp_path):
    """Letters must not merge into the byte's own token, which would read back as "A"."""
    tokenizer = sentencepiece(tmp_path)
    ids = tokenizer.encode("<0x41>", add_special_tokens=False)
    assert ids == slow_sentencepiece("<0x41>", prefix=True)
    assert tokenizer.decode(ids) == "<0x41>"


def test_sentencepiece_adds_bos_and_byte_pieces(tmp_path):
    tokenizer = sentencepiece(tmp_path)
    ids = tokenizer.encode("cat你")
    assert ids[0] == 1
    assert [tokenizer.token_bytes(i) for i in ids[2:]] == [b"\xe4", b"\xbd", b"\xa0"]
    assert tokenizer.token_text(ids[1]) == " cat"
    assert tokenizer.eos_token_ids == (2,)
