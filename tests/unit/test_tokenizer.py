"""Tokenizers of Hugging Face folders, decoding of every kind of vocabulary, chat templates."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from tiny_vllm.errors import InvalidRequestError, ModelLoadError
from tiny_vllm.hub import resolve_model
from tiny_vllm.tokenizer import StreamingDetokenizer, Tokenizer, load_tokenizer
from tiny_vllm.tokenizer.chat import ChatTemplate

WORDS = ["<unk>", "<s>", "</s>", "hello", "world", "again"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'bad' %}{{ raise_exception('no role bad') }}{% endif %}\n"
    "[{{ message.role }}] {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def word_backend() -> tokenizers.Tokenizer:
    vocab = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend


def make_folder(path: Path, backend: tokenizers.Tokenizer | None = None, **settings) -> Path:
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (backend or word_backend()).save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def load(folder: Path, override: str | None = None) -> Tokenizer:
    return load_tokenizer(resolve_model(str(folder)), override)


def test_folder(tmp_path):
    tokenizer = load(make_folder(tmp_path))
    assert tokenizer.encode("hello world") == [1, 3, 4]
    assert tokenizer.encode("hello world", add_special_tokens=False) == [3, 4]
    assert tokenizer.decode([1, 3, 4, 2]) == "hello world"
    assert tokenizer.decode([3, 2], skip_special_tokens=False) == "hello </s>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == len(WORDS)
    assert not tokenizer.has_chat_template


def test_stored_truncation_and_padding_do_not_cut_prompts(tmp_path):
    """tokenizer.json may carry the settings of a training run: prompts were cut to 512."""
    backend = word_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = load(make_folder(tmp_path, backend))
    assert tokenizer.encode("hello " * 5, add_special_tokens=False) == [3] * 5


def test_generation_config_adds_end_tokens(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert load(tmp_path).eos_token_ids == (5, 2)


def test_override_names_another_folder(tmp_path):
    folder = make_folder(tmp_path)
    preset = resolve_model("llama-3.2-1b")
    assert load_tokenizer(preset, str(folder)).vocab_size == len(WORDS)
    with pytest.raises(ModelLoadError, match="skip_tokenizer_init"):
        load_tokenizer(preset)


def test_folder_faults_name_the_file(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "got NoneType"), (b"x", "got bytes"), ("ab\ud83d", "lone surrogate .* character 2")],
)
def test_text_that_cannot_be_encoded(text, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        Tokenizer(word_backend()).encode(text)


def test_ids_outside_the_vocabulary_have_no_text():
    """Models often have more rows than their tokenizer has tokens."""
    tokenizer = Tokenizer(word_backend())
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([3, 10**6, 4]) == "hello world"


def sentencepiece_backend() -> tokenizers.Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hi", "▁yes", "a", "▁▁"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>"])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "▁hi": 1, "a": 2, "▁yes": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return backend


def wordpiece_backend() -> tokenizers.Tokenizer:
    vocab = {"[UNK]": 0, "un": 1, "##a": 2, "b": 3}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return backend


@pytest.mark.parametrize(
    ("backend", "ids"),
    [
        (sentencepiece_backend(), [258, 260, 257, 259, 261, *(b + 1 for b in "é你".encode()), 258]),
        (sentencepiece_backend(), [257, 258, 260]),
        (sentencepiece_backend(), [261, 260]),
        (metaspace_backend(), [1, 2, 3, 3, 2]),
        (wordpiece_backend(), [1, 2, 3, 1, 2, 2]),
        (word_backend(), [3, 4, 5, 3]),
    ],
)
def test_decode_is_the_librarys_own_and_streams_the_same(backend, ids):
    tokenizer = Tokenizer(backend)
    expected = backend.decode(ids)
    assert tokenizer.decode(ids) == expected
    detokenizer = StreamingDetokenizer(tokenizer)
    detokenizer.append(ids)
    detokenizer.finish()
    assert detokenizer.text == expected


def test_leading_space_stays_after_a_prompt():
    """Only where a text begins does SentencePiece's first space stand for nothing."""
    tokenizer = Tokenizer(sentencepiece_backend())
    detokenizer = StreamingDetokenizer(tokenizer, prompt_token_ids=[258])
    detokenizer.append([259])
    assert detokenizer.text == " yes"


def test_added_token_outside_the_byte_alphabet_is_plain_text():
    """Its characters look like GPT-2's bytes in part; read so, they would become U+FFFD."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<｜énd｜>", special=True, normalized=False)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "a<｜énd｜>"
    assert tokenizer.token_text(1) == "<｜énd｜>"


def test_decoder_that_needs_neighbours_is_refused():
    backend = word_backend()
    backend.decoder = decoders.BPEDecoder()
    with pytest.raises(ModelLoadError, match="'BPEDecoder'"):
        Tokenizer(backend)


# --- chat templates ---------------------------------------------------------


@pytest.mark.parametrize("where", ["settings", "named", "jinja", "json"])
def test_template_is_found_and_rendered(tmp_path, where):
    settings = {
        "settings": {"chat_template": TEMPLATE},
        "named": {
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": TEMPLATE},
            ]
        },
        "jinja": {"chat_template": "overridden by the file"},
        "json": {},
    }[where]
    make_folder(tmp_path, **settings)
    if where == "jinja":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    if where == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokenizer = load(tmp_path)
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hm"}]
    assert tokenizer.apply_chat_template(messages) == "<s>[user] hello\n[assistant] hm\n[assistant]"
    assert tokenizer.apply_chat_template(messages[:1], False) == "<s>[user] hello\n"


def render(source: str, messages=({"role": "user", "content": "x"},), **extra) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, True, **extra)


def test_environment_gives_what_templates_use():
    assert render("{{ tools | tojson }}", tools=[{"é": "<&>"}]) == '[{"é": "<&>"}]'
    assert render("{% for i in [1, 2] %}{% break %}{% endfor %}ok") == "ok"
    assert render("{% generation %}{{ bos_token }}{% endgeneration %}") == "<s>"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ missing }}.") == "."


def test_text_parts_are_joined_and_tool_calls_need_no_content():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    source = "{% for m in messages %}[{{ m.content }}{{ m.tool_calls | length }}]{% endfor %}"
    assert render(source, messages) == "[a\nb0][1]"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one"),
        ("hello", "list of messages, got str"),
        ({"role": "user"}, "list of messages, got dict"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role .* None"),
        ([{"role": "user"}], r"messages\[0\]\.content .* NoneType"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content .* int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\].*'image_url'"),
        ([{"role": "bad", "content": "x"}], "no role bad"),
    ],
)
def test_bad_messages_are_refused_by_name(messages, reason):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        render(TEMPLATE, messages)
    assert caught.value.field == "messages"


def test_model_without_template_refuses_chat():
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer(word_backend()).apply_chat_template([{"role": "user", "content": "x"}])


def test_templates_run_in_a_sandbox():
    source = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequestError, match="unsafe"):
        render(source)
    with pytest.raises(InvalidRequestError, match="unsafe"):
        render("{{ messages.append(1) }}")


def test_broken_template_is_the_models_fault():
    with pytest.raises(ModelLoadError, match="no valid Jinja"):
        render("{% for %}")
