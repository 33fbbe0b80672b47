"""The generated pages match the code, and every flag is explained."""

import dataclasses
import re
from pathlib import Path

import pytest

from tiny_vllm.bench.trace import FIELD_HELP, read_trace
from tiny_vllm.bench.workloads import DESCRIPTIONS
from tiny_vllm.cli.docs import PAGES, main
from tiny_vllm.cli.generate import COMPLETION_HELP, JSON_HELP
from tiny_vllm.cli.main import COMMANDS
from tiny_vllm.cli.options import ENGINE, SAMPLING, FlagGroup

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_up_to_date(name: str) -> None:
    on_disk = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert on_disk == PAGES[name](), f"docs/{name} is stale: run `make docs`"


def test_pages_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(PAGES)
    assert "cli.md" in capsys.readouterr().out


@pytest.mark.parametrize("group", [ENGINE, SAMPLING], ids=["engine", "sampling"])
def test_every_field_has_a_help_text(group: FlagGroup) -> None:
    fields = {item.name for item in dataclasses.fields(group.cls)} - {"reasons"}
    assert set(group.help) == fields


def test_every_command_has_a_section() -> None:
    page = PAGES["cli.md"]()
    assert re.findall(r"^## tiny-vllm (\S+)", page, re.MULTILINE) == list(COMMANDS)


def test_the_trace_lines_of_the_page_can_be_read(tmp_path: Path) -> None:
    example = PAGES["cli.md"]().split("```")[1]
    (tmp_path / "t.jsonl").write_text(example, encoding="utf-8")
    assert [r.arrival for r in read_trace(tmp_path / "t.jsonl")] == [None, 0.5, 1.25]


def test_every_workload_and_format_is_on_the_page() -> None:
    page = PAGES["cli.md"]()
    for name in (*DESCRIPTIONS, *FIELD_HELP, *JSON_HELP, *COMPLETION_HELP):
        assert f"| `{name}` |" in page, name


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "docs/architecture.md"])
def test_local_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name} links to {target}"


def test_examples_are_short() -> None:
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert len(examples) >= 4
    for path in examples:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 40, path.name
