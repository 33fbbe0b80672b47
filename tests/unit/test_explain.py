"""`tiny-vllm explain` on a run folder written by hand."""

import json
from pathlib import Path

import pytest

from tests.unit.bench_fake import make_info
from tiny_vllm.bench.folder import RunFolder
from tiny_vllm.bench.records import RequestRecord, RunResult
from tiny_vllm.cache_report import CacheRange, CacheReport, MissReason
from tiny_vllm.cli.main import main
from tiny_vllm.metrics import PeakMemory
from tiny_vllm.protocol import TokenLedger

DIVERGED = {"here_token": 7, "there_token": 8, "request_id": "a"}
EVICTED = {
    "seconds_ago": 1.5,
    "step": 9,
    "request_id": "b",
    "blocks_used": 30,
    "blocks_total": 32,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    reports = {
        "a": CacheReport((CacheRange(0, 100, MissReason.COLD),)),
        "b": CacheReport(
            (CacheRange(0, 60), CacheRange(60, 100, MissReason.DIVERGED, DIVERGED)), 12
        ),
        "c": CacheReport(
            (CacheRange(0, 96, MissReason.EVICTED, EVICTED), CacheRange(96, 100, MissReason.COLD))
        ),
    }
    records = [
        RequestRecord(name, 0.0, 100, 4, cache_report=report.to_dict())
        for name, report in reports.items()
    ]
    plain = [RequestRecord("a", 0.0, 100, 4)]
    manifest = {
        "variants": [{"name": "origin"}, {"name": "extended"}],
        "model": "no/such-model",
        "engine": {},
    }
    run = RunFolder.create(tmp_path / "runs" / "one", manifest)
    for name, rows in (("origin", plain), ("extended", records)):
        result = RunResult(make_info(), rows, [], 1.0, TokenLedger(), PeakMemory(1, "rss"))
        run.add_run(name, 0, result)
    return run.path


def test_each_request_has_a_sentence_and_the_totals_add_up(folder, capsys):
    assert main(["explain", str(folder)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].endswith("variant extended: 3 requests")
    assert lines[1] == "request a (100 tokens): tokens 0-99 cold; 100 tokens computed"
    assert lines[2] == (
        "request b (100 tokens): tokens 0-59 hit (12 of them copied); diverged at token 60: "
        "token id 7 here, token id 8 in request a; 40 tokens computed"
    )
    assert (
        "tokens 0-95 evicted 1.5 s ago, in step 9, for request b while requests held 30 of 32 "
        "blocks" in lines[3]
    )
    assert "prompt tokens: 300" in lines
    found = {
        row.split()[0]: int(row.split()[1])
        for row in lines[lines.index("prompt tokens: 300") + 1 :]
    }
    assert found == {"hit": 60, "cold": 104, "evicted": 96, "diverged": 40}
    assert "tokens are shown as ids" in err


def test_json_has_one_line_a_request_and_the_totals_last(folder, capsys):
    assert main(["explain", str(folder), "--json", "--request", "b"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["cache_report"]["ranges"][1]["reason"] == "diverged"
    assert rows[0]["cache_report"]["ranges"][1]["request_id"] == "a"
    assert rows[1]["tokens"]["hit"] == 60 and sum(rows[1]["tokens"].values()) == 100


def test_the_newest_run_is_the_default(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    assert main(["explain", "-r", "a"]) == 0
    assert "runs/one" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--request", "zz"], "request 'zz' is not in this run; there are a, b, c"),
        (["--variant", "other"], "this run has origin, extended"),
        (["--repeat", "3"], "--repeat 3: extended has no such run"),
    ],
)
def test_what_is_not_there_is_named(folder, capsys, arguments, message):
    assert main(["explain", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_variant_without_a_cache_says_so(folder, capsys):
    assert main(["explain", str(folder), "--variant", "origin"]) == 0
    assert "no prefix cache" in capsys.readouterr().out


def test_no_run_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["explain"]) == 2
    assert "no run folder under runs/" in capsys.readouterr().err
    assert main(["explain", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
