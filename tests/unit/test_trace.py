"""The trace reader: every kind of bad line names file, line and field."""

import json
from pathlib import Path
from typing import Any

import pytest

from tiny_vllm.bench.trace import TraceRequest, read_trace, trace_sha256
from tiny_vllm.errors import TraceError

GOOD = '{"prompt_token_ids": [1, 2, 3], "max_tokens": 4}'


def read(path: Path, *lines: str, vocab_size: int | None = None) -> list[TraceRequest]:
    file = path / "t.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return list(read_trace(file, vocab_size))


def test_reads_all_forms(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "arrival": 2}
    rows = read(tmp_path, GOOD, "", '{"prompt": "text", "max_tokens": 9}', json.dumps(chat))
    assert [r.request_id for r in rows] == ["1", "3", "4"]
    assert rows[0].token_ids == (1, 2, 3)
    assert (rows[1].prompt, rows[1].max_tokens) == ("text", 9)
    assert rows[2].arrival == 2.0
    assert rows[2].messages == ({"role": "user", "content": "hi"},)


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    """A bad last line must not keep the reader from yielding the first."""
    file = tmp_path / "t.jsonl"
    file.write_text(GOOD + "\nnonsense\n")
    rows = read_trace(file)
    assert next(rows).max_tokens == 4
    with pytest.raises(TraceError, match="line 2"):
        next(rows)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        pytest.param("[" * 100_000, "line 2: not JSON", id="deep"),
        ("[1]", "line 2: a JSON object is needed, not a list"),
        ('{"max_tokens": 1}', "exactly one of the fields prompt_token_ids, prompt, messages"),
        ('{"prompt": "a", "messages": [], "max_tokens": 1}', "found prompt, messages"),
        ('{"prompt": "a"}', "field 'max_tokens' is missing"),
        ("{}", "exactly one .*found none; field 'max_tokens' is missing$"),
        ('{"text": "a", "max_token": 1}', r"is missing \(unknown: 'text', 'max_token'\)"),
        ('{"prompt": "a", "max_tokens": 0}', "field 'max_tokens' must be .* >= 1, got 0"),
        ('{"prompt": "a", "max_tokens": "5"}', "'max_tokens' .* got the string '5'"),
        ('{"prompt": "a", "max_tokens": true}', "'max_tokens' .* got true"),
        ('{"prompt": "a", "max_tokens": 1.5}', "'max_tokens' .* got 1.5"),
        ('{"prompt": "", "max_tokens": 1}', "field 'prompt' .* got an empty string"),
        ('{"prompt": 7, "max_tokens": 1}', "field 'prompt' .* got 7"),
        ('{"prompt_token_ids": [], "max_tokens": 1}', "'prompt_token_ids' .* got an empty list"),
        ('{"prompt_token_ids": "12", "max_tokens": 1}', "'prompt_token_ids' .* string '12'"),
        ('{"prompt_token_ids": [1, "2"], "max_tokens": 1}', "the string '2' at position 1"),
        ('{"prompt_token_ids": [1, -2], "max_tokens": 1}', "negative id -2 at position 1"),
        ('{"prompt_token_ids": [1, 50], "max_tokens": 1}', "id 50 .*vocabulary of 50"),
        ('{"messages": [], "max_tokens": 1}', "'messages' .* got an empty list"),
        ('{"messages": [{"role": "user"}], "max_tokens": 1}', "'messages' needs .* position 0"),
        ('{"prompt": "a", "max_tokens": 1, "arrival": -1}', "'arrival' must be .* got -1"),
        ('{"prompt": "a", "max_tokens": 1, "arrival": NaN}', "'arrival' must be .* got nan"),
        ('{"prompt": "a", "max_tokens": 1, "arrival": "x"}', "'arrival' .* the string 'x'"),
    ],
)
def test_a_bad_line_names_file_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as error:
        read(tmp_path, GOOD, line, vocab_size=50)
    assert str(error.value).startswith(f"{tmp_path / 't.jsonl'}, line 2: ")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(content)
    with pytest.raises(TraceError, match="holds no request"):
        list(read_trace(file))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read trace .*gone\.jsonl"):
        list(read_trace(tmp_path / "gone.jsonl"))


def test_a_binary_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        list(read_trace(file))


def test_text_has_no_length_before_it_is_tokenized(tmp_path: Path) -> None:
    (row,) = read(tmp_path, '{"prompt": "text", "max_tokens": 9}')
    with pytest.raises(TraceError, match="tokenize"):
        _ = row.num_prompt_tokens


def test_the_hash_covers_what_an_engine_sees() -> None:
    def sha(**changes: Any) -> str:
        values = {"request_id": "a", "prompt_token_ids": (1, 2), "max_tokens": 3, "arrival": None}
        return trace_sha256([TraceRequest(**{**values, **changes})])

    assert sha() == sha(request_id="b", prompt_token_ids=[1, 2])
    assert len({sha(), sha(prompt_token_ids=(1, 3)), sha(max_tokens=4), sha(arrival=0.5)}) == 4
