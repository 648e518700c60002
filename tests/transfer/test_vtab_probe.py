"""Sweeps by features alone: method=linear and method=knn."""

import json
from pathlib import Path

import pytest
from tiny_vtab import prepare, run_here

from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.transfer import vtab
from pipeline.transfer.score_table import columns


@pytest.mark.parametrize("method", ["linear", "knn"])
def test_a_probe_has_one_score_whatever_the_seeds(tmp_path: Path, method: str) -> None:
    settings = [*prepare(tmp_path), "protocol.lr=[0.1]", f"method={method}"]

    def sweep(seeds: str) -> list[dict]:
        results = vtab.run(schema.load(VtabConfig, None, [*settings, f"seeds={seeds}"]), tmp_path / "out", run_here)
        assert results is not None
        return results["scores"]

    scores = sweep("[0]")
    assert sweep("[1,2]") == scores
    # Earlier versions gave the score the first of the seeds. Two seeds would have an interval over seeds, of no width.
    file = tmp_path / "out" / "results.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"scores": [row | {"seed": 3} for row in scores]}))
    assert sweep("[0]") == scores
    interval = columns([tmp_path / "out"])[0].tasks["dtd"].interval
    assert interval is not None
    assert interval.over == "over test samples"
