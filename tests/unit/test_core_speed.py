"""The micro-benchmark of the control plane runs; nothing is asserted of its times."""

import json
import sys

from tiny_vllm.bench import core_speed


def test_every_piece_is_measured_and_written(tmp_path, capsys, monkeypatch):
    path = tmp_path / "speed.json"
    arguments = ["--prompt-tokens", "100", "--block-size", "16", "--rows", "3", "--repeats", "4"]
    monkeypatch.setattr(sys, "argv", ["core_speed", *arguments, "--out", str(path)])
    core_speed.main()
    result = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert len(result["pieces"]) == 6
    assert all(0 < p["least_us"] <= p["median_us"] for p in result["pieces"].values())
    assert result["settings"]["rows"] == 3
