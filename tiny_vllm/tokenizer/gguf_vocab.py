"""A tokenizer from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

How text is split before BPE is not in the file, only the split's name
(`tokenizer.ggml.pre`); `_SPLITS` holds the known ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.gguf_header import read_gguf_header
from tiny_vllm.logger import get_logger
from tiny_vllm.tokenizer.chat import ChatTemplate
from tiny_vllm.tokenizer.tokenizer import Tokenizer

_log = get_logger(__name__)

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level BPE splits text first.

    Attributes:
        pattern: regular expression of the parts; None = GPT-2's, which `ByteLevel` has.
        single_digits: digits are split one by one before the pattern.
        nfc: text is composed (Unicode NFC) first.
        ignore_merges: a part that is a token is taken whole.
        adds_bos: when the file does not say whether to begin with the BOS token.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT2 = _Split()
_SMOLLM = _Split(single_digits=True)
_LLAMA_BPE = _Split(_LLAMA3, ignore_merges=True, adds_bos=True)
_QWEN = _Split(_QWEN2, nfc=True)
_SPLITS: Mapping[str, _Split] = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
}


class _Vocabulary:
    """The `tokenizer.ggml.*` keys of one file."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self._metadata = metadata
        self.tokens: list[str] = self.get("tokens") or []
        if not self.tokens:
            raise ModelLoadError(
                f"{path} holds no tokenizer; name another one (tokenizer=...) or use token ids "
                "only (skip_tokenizer_init)"
            )
        self.types: list[int] = self.get("token_type") or [_NORMAL] * len(self.tokens)

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def of_type(self, kind: int) -> list[str]:
        return [t for t, k in zip(self.tokens, self.types, strict=False) if k == kind]

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def named(self) -> dict[str, str]:
        """Texts of the special tokens under the names that chat templates use."""
        keys = {
            "bos_token": "bos_token_id",
            "eos_token": "eos_token_id",
            "unk_token": "unknown_token_id",
            "pad_token": "padding_token_id",
        }
        ids = {name: self.get(key) for name, key in keys.items()}
        size = len(self.tokens)
        return {n: self.tokens[i] for n, i in ids.items() if i is not None and i < size}


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """Build the tokenizer a GGUF file describes.

    Raises:
        ModelLoadError: no vocabulary, or a kind or split that is not known; names it.
    """
    header = read_gguf_header(path)
    vocabulary = _Vocabulary(path, header.metadata)
    kind = vocabulary.get("model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(vocabulary)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_bpe(vocabulary), True
    else:
        raise ModelLoadError(
            f"{path}: tokenizer.ggml.model is {kind!r}; supported are gpt2 and llama"
        )
    _add_special_tokens(backend, vocabulary, adds_bos)
    source = header.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_token_id=vocabulary.get("bos_token_id"),
        eos_token_ids=header.eos_token_ids(),
        chat_template=ChatTemplate(source, vocabulary.named()) if source else None,
    )


def _byte_level_bpe(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    split = _find_split(vocabulary)
    pairs = [tuple(line.split(" ")) for line in vocabulary.get("merges") or []]
    backend = Backend(_bpe(vocabulary, pairs, ignore_merges=split.ignore_merges))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    use_regex = split.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _find_split(vocabulary: _Vocabulary) -> _Split:
    name = vocabulary.get("pre")
    if name is None:
        _log.warning("%s does not name its pre-tokenizer: GPT-2's is used", vocabulary.path)
        return _GPT2
    if name not in _SPLITS:
        raise ModelLoadError(
            f"{vocabulary.path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; "
            f"known are {', '.join(_SPLITS)}. Name the model's Hugging Face folder as tokenizer"
        )
    return _SPLITS[name]


def _bpe(vocabulary: _Vocabulary, pairs: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids(), merges=pairs, **options)
    except Exception as error:  # the library raises bare Exception and TypeError
        raise ModelLoadError(f"{vocabulary.path}: merges do not fit the tokens: {error}") from error


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> Backend:
    """SentencePiece BPE: spaces are `▁`, unknown characters fall back to their bytes."""
    unknown = vocabulary.named().get("unk_token")
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    backend = Backend(_bpe(vocabulary, _merges_from_scores(vocabulary), **options))
    add_prefix = bool(vocabulary.get("add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    prepend = [normalizers.Prepend("▁")] if add_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, replace])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best: every split of every token."""
    scores = vocabulary.get("scores") or []
    if len(scores) != len(vocabulary.tokens):
        raise ModelLoadError(
            f"{vocabulary.path}: {len(scores)} scores for {len(vocabulary.tokens)} tokens"
        )
    rows = zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
    normal = {token: score for token, kind, score in rows if kind == _NORMAL}
    found = []
    for token, score in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                found.append((-score, left, right))
    found.sort(key=lambda item: item[0])  # stable: ties keep the vocabulary's order
    return [(left, right) for _, left, right in found]


def _add_special_tokens(backend: Backend, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    control = [AddedToken(t, normalized=False, special=True) for t in vocabulary.of_type(_CONTROL)]
    backend.add_special_tokens(control)
    defined = vocabulary.of_type(_USER_DEFINED)
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in defined])
    before = _edge_token(vocabulary, "bos_token_id", vocabulary.get("add_bos_token", adds_bos))
    after = _edge_token(vocabulary, "eos_token_id", vocabulary.get("add_eos_token", False))
    edges = [*before, *after]
    if edges:
        template = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(dict.fromkeys(edges))
        )


def _edge_token(vocabulary: _Vocabulary, key: str, wanted: bool) -> list[tuple[str, int]]:
    token_id = vocabulary.get(key)
    if not wanted or token_id is None:
        return []
    if not 0 <= token_id < len(vocabulary.tokens):
        raise ModelLoadError(
            f"{vocabulary.path}: tokenizer.ggml.{key}={token_id} is outside the vocabulary of "
            f"{len(vocabulary.tokens)} tokens"
        )
    return [(vocabulary.tokens[token_id], token_id)]
