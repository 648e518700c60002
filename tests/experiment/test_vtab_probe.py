"""Sweeps by features alone: method=linear."""

from pathlib import Path
from typing import Any

from tiny import make_dataset
from tiny_vtab import prepare, run_here

from pipeline.experiment import vtab
from pipeline.experiment.vtab import Sweep
from pipeline.experiment.vtab_report import column_of
from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig


def test_a_probe_has_one_score_whatever_the_seeds(tmp_path: Path) -> None:
    settings = [*prepare(tmp_path), "protocol.lr=[0.1]", "method=linear"]

    def sweep(seeds: str) -> dict[str, Any]:
        config = schema.load(VtabConfig, None, [*settings, f"seeds={seeds}", f"out={tmp_path / 'out'}"])
        return vtab.run(config, run_here)

    results = sweep("[0]")
    assert sweep("[1,2]")["scores"] == results["scores"]
    # Two seeds would have an interval over seeds, of no width.
    assert column_of("", results).tasks["dtd"].interval.over == "over test samples"


def test_a_data_set_of_another_origin_is_not_taken_for_a_task(tmp_path: Path) -> None:
    """Of launch/shard.py, or of another task in the folder of this one."""
    settings = [*prepare(tmp_path), "protocol.lr=[0.1]", "method=linear"]
    splits = {"train800": 16, "val200": 5, "train800val200": 21, "test": 12}
    make_dataset(tmp_path / "tasks" / "eurosat", splits)
    (tmp_path / "tasks" / "svhn").rename(tmp_path / "tasks" / "cifar100")
    sweep = Sweep(schema.load(VtabConfig, None, settings), tmp_path / "out")
    assert sweep.unpublished == ["cifar100", "eurosat"]
