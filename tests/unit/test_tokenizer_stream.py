"""Streaming decode: characters, stop strings and the prompt's end, against a slow twin."""

import codecs

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tiny_vllm.tokenizer import StopMatch, StreamingDetokenizer, Tokenizer
from tiny_vllm.tokenizer.pieces import byte_alphabet

SPECIAL = "<|end|>"
LONG_PIECES = ["hello", " world", "你", "🎉!", "\n\n", "stop", "ST", "OP"]
# pieces that end or begin inside a character: 2 of 3 bytes, the last byte with more text
BROKEN_PIECES = [b"\xe4\xbd", b"\xa0ab", b"\xf0\x9f", b"\x8e\x89", b"x\xe4"]


def make_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes, then the pieces above, then one special token."""
    to_char = {byte: character for character, byte in byte_alphabet().items()}
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [text.encode() for text in LONG_PIECES] + BROKEN_PIECES
    vocab = {"".join(to_char[b] for b in piece): i for i, piece in enumerate(pieces)}
    assert len(vocab) == len(pieces)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    return Tokenizer(backend)


TOKENIZER = make_tokenizer()
SPECIAL_ID = TOKENIZER.encode(SPECIAL)[0]
NUM_IDS = TOKENIZER.vocab_size


def ids_of(text: str) -> list[int]:
    """One token a byte."""
    return list(text.encode())


def feed(detokenizer: StreamingDetokenizer, ids, sizes=(1,)) -> tuple[list[str], StopMatch | None]:
    """Append in chunks of the given sizes, again and again; return (deltas, stop match)."""
    deltas, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        match = detokenizer.append(ids[start : start + size])
        deltas.append(detokenizer.take())
        if match is not None:
            return deltas, StopMatch(match.stop, start + match.num_tokens)
        start, turn = start + size, turn + 1
    detokenizer.finish()
    deltas.append(detokenizer.take())
    return deltas, None


def slow_twin(ids, stops, include, skip, min_tokens) -> tuple[str, StopMatch | None]:
    """Decode everything anew after each token and look for stop strings in all of it."""
    before = ""
    for count in range(1, len(ids) + 1):
        kept = [i for i in ids[:count] if not (skip and i == SPECIAL_ID)]
        data = b"".join(TOKENIZER.token_bytes(i) for i in kept)
        text, _ = codecs.utf_8_decode(data, "replace", False)
        if count >= min_tokens:
            hits = []
            for order, stop in enumerate(stops):
                starts = [s for s in range(len(text)) if text.startswith(stop, s)]
                new = [s for s in starts if s + len(stop) > len(before)]
                hits += [(min(new), order, stop)] if new else []
            if hits:
                start, _, stop = min(hits)
                end = start + len(stop) if include else start
                return text[:end], StopMatch(stop, count)
        before = text
    return TOKENIZER.decode(ids, skip), None


token_ids = st.one_of(
    st.integers(0, NUM_IDS + 3),  # a few beyond the vocabulary
    st.integers(256, NUM_IDS - 1),
    st.sampled_from([ord(c) for c in "STOPab "]),
)
stop_strings = st.sampled_from(
    ["STOP", "OP", "S", "你", "你ab", "🎉", "\ufffd", "hello world", "P!"]
)


@settings(deadline=None, max_examples=400)
@given(
    ids=st.lists(token_ids, max_size=25),
    stops=st.lists(stop_strings, max_size=3, unique=True).map(tuple),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 8),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_agrees_with_the_slow_twin(ids, stops, include, skip, min_tokens, sizes):
    expected, expected_match = slow_twin(ids, stops, include, skip, min_tokens)
    detokenizer = StreamingDetokenizer(TOKENIZER, [], stops, include, skip, min_tokens)
    deltas, match = feed(detokenizer, ids, sizes)
    assert match == expected_match
    shown = ""
    for delta in deltas:
        shown += delta
        assert expected.startswith(shown), "something was shown that is not in the text"
    assert shown == expected == detokenizer.text


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="aé你🎉\U0010ffff\n ST", max_size=20),
    cut=st.integers(0, 80),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_case_19_prompt_may_end_anywhere_in_a_text(text, cut, sizes):
    """The output completes the prompt's character: nothing lost, no U+FFFD, no prompt text."""
    ids = ids_of(text)
    prompt, output = ids[:cut], ids[cut:]
    readable, _ = codecs.utf_8_decode(bytes(prompt), "strict", False)
    detokenizer = StreamingDetokenizer(TOKENIZER, prompt)
    deltas, _ = feed(detokenizer, output, sizes)
    assert "".join(deltas) == (text.removeprefix(readable) if output else "")


@pytest.mark.parametrize("text", ["plain", "é", "你好，世界", "👩‍👩‍👧 family", "🎉" * 5, "\ufffd"])
def test_case_19_characters_are_shown_whole(text):
    detokenizer = StreamingDetokenizer(TOKENIZER)
    deltas, _ = feed(detokenizer, ids_of(text))
    assert "".join(deltas) == text
    assert all(delta == "" or delta in text for delta in deltas)


def test_prompt_that_ends_inside_a_character_and_is_not_continued():
    """The prompt's two bytes are no text of the output, broken or not."""
    broken = list(b"ab" + "你".encode()[:2])
    detokenizer = StreamingDetokenizer(TOKENIZER, broken)
    assert feed(detokenizer, ids_of("hi"))[0] == ["h", "i", ""]
    ended = StreamingDetokenizer(TOKENIZER, broken)
    ended.finish()
    assert ended.text == ""


def test_special_token_at_the_end_of_the_prompt_closes_its_character():
    prompt = [*"你".encode()[:2], SPECIAL_ID]
    deltas, _ = feed(StreamingDetokenizer(TOKENIZER, prompt), ids_of("ok"))
    assert "".join(deltas) == "ok"


def test_case_19_incomplete_character_is_shown_only_at_the_end():
    detokenizer = StreamingDetokenizer(TOKENIZER)
    assert detokenizer.append(list("好".encode()[:2])) is None
    assert detokenizer.text == ""
    detokenizer.finish()
    assert detokenizer.text == "\ufffd"


@pytest.mark.parametrize("include", [False, True])
def test_case_18_stop_string_across_tokens_is_never_streamed(include):
    detokenizer = StreamingDetokenizer(TOKENIZER, stop=("STOP",), include_stop_str=include)
    deltas, match = feed(detokenizer, ids_of("a STaSTOPb"))
    assert match == StopMatch("STOP", 9)
    wanted = "a STaSTOP" if include else "a STa"
    assert detokenizer.text == "".join(deltas) == wanted
    assert deltas[:5] == ["a", " ", "", "", "STa"]  # held until it can no longer be a stop


def test_case_18_stop_string_equal_to_the_first_token():
    stop = TOKENIZER._backend.token_to_id("hello")
    detokenizer = StreamingDetokenizer(TOKENIZER, ids_of("hello"), ("hello",))
    assert detokenizer.append([stop, *ids_of("more")]) == StopMatch("hello", 1)
    assert detokenizer.text == ""


def test_case_18_stop_string_inside_multi_byte_characters():
    detokenizer = StreamingDetokenizer(TOKENIZER, stop=("好",))
    deltas, match = feed(detokenizer, ids_of("你好吗"))
    assert match == StopMatch("好", 6)
    assert "".join(deltas) == "你"


def test_tokens_after_the_stop_string_in_one_append_do_not_count():
    detokenizer = StreamingDetokenizer(TOKENIZER, stop=("b",))
    assert detokenizer.append(ids_of("abcd")) == StopMatch("b", 2)
    assert detokenizer.append(ids_of("b")) is None
    detokenizer.finish()
    assert detokenizer.text == "a"


def test_stop_string_is_not_looked_for_in_the_prompt():
    detokenizer = StreamingDetokenizer(TOKENIZER, ids_of("ST"), ("STOP",))
    deltas, match = feed(detokenizer, ids_of("OP"))
    assert (deltas, match) == (["O", "P", ""], None)


def test_unfinished_stop_string_is_flushed_at_the_end():
    detokenizer = StreamingDetokenizer(TOKENIZER, stop=("STOP",))
    assert feed(detokenizer, ids_of("xSTO")) == (["x", "", "", "", "STO"], None)


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 1), (1, 1), (2, 3), (3, 3), (4, None)])
def test_min_tokens_masks_earlier_stop_strings(min_tokens, count):
    detokenizer = StreamingDetokenizer(TOKENIZER, stop=("S",), min_tokens=min_tokens)
    _, match = feed(detokenizer, ids_of("SaSb"))
    assert match == (None if count is None else StopMatch("S", count))
    assert detokenizer.text == {1: "", 3: "Sa", None: "SaSb"}[count]


def test_masked_stop_string_is_not_found_later():
    """ "S" ends before min_tokens; it is still held back, as the start of the longer one."""
    detokenizer = StreamingDetokenizer(TOKENIZER, stop=("S", "SaX"), min_tokens=2)
    assert feed(detokenizer, ids_of("Sab")) == (["", "", "Sab", ""], None)


def test_several_stop_strings_hold_back_the_longest_beginning():
    detokenizer = StreamingDetokenizer(TOKENIZER, stop=("abcd", "cX", "zz"))
    deltas, match = feed(detokenizer, ids_of("-abcd"))
    assert (deltas, match) == (["-", "", "", "", ""], StopMatch("abcd", 5))


@pytest.mark.parametrize("stops", [("he", "hello"), ("hello", "he")])
def test_of_stop_strings_at_one_place_the_first_given_counts(stops):
    token = TOKENIZER._backend.token_to_id("hello")
    detokenizer = StreamingDetokenizer(TOKENIZER, stop=("lo", *stops), include_stop_str=True)
    assert detokenizer.append([token]) == StopMatch(stops[0], 1)
    assert detokenizer.text == stops[0]


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, f"a{SPECIAL}b")])
def test_special_tokens(skip, text):
    ids = [ord("a"), SPECIAL_ID, ord("b")]
    detokenizer = StreamingDetokenizer(TOKENIZER, skip_special_tokens=skip)
    assert "".join(feed(detokenizer, ids)[0]) == text == TOKENIZER.decode(ids, skip)


def test_work_per_token_does_not_grow(monkeypatch):
    """Counts the bytes looked up: one token's each time, however long the output is."""
    looked_up = []
    original = Tokenizer.token_bytes
    monkeypatch.setattr(
        Tokenizer, "token_bytes", lambda self, i: looked_up.append(i) or original(self, i)
    )
    detokenizer = StreamingDetokenizer(TOKENIZER, ids_of("prompt " * 1000), ("STOP",))
    before = len(looked_up)
    assert before <= 4
    feed(detokenizer, ids_of("abc " * 500))
    assert len(looked_up) - before == 2000
