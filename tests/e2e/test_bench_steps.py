"""`python -m tiny_vllm.bench.steps` on the small real model, shrunk for a CPU."""

import json

import pytest

from tiny_vllm.bench import steps


def test_lines_hold_first_step_and_total(tmp_path, capsys) -> None:
    out = tmp_path / "steps.json"
    arguments = ["single,shared-2x1k", "--model", "smollm2-135m", "--load-format", "auto"]
    arguments += ["--device", "cpu", "--scale", "0.02", "--repeats", "1", "--out", str(out)]
    assert steps.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    single, shared = (json.loads(line) for line in lines)
    assert (single["workload"], shared["workload"]) == ("single", "shared-2x1k")
    for line in (single, shared):
        assert 0 < line["first_ms"] / 1e3 < line["total_s"]
        assert line["step_ms"] > 0 and line["out_tok_s"] > 0
        assert line["scale"] == 0.02
    assert single["kv_logical_over_physical"] == 1.0
    stored = json.loads(out.read_text())
    assert [r["workload"] for r in stored["results"]] == ["single", "shared-2x1k"]
    assert stored["config"]["model"] == "smollm2-135m"


def test_a_workload_of_text_is_refused() -> None:
    with pytest.raises(Exception, match="text"):
        steps.main(["demo", "--model", "smollm2-135m", "--load-format", "auto", "--device", "cpu"])
