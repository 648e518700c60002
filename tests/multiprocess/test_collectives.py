"""Collective calls of a run: each waits for the slowest rank, and on a thousand of them takes time."""

import json
from pathlib import Path

import pytest
from forked import Forge
from ranks import STEPS, metrics, settings


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_record_with_its_line_takes_one_gather_of_numbers(
    world_size: int, forge: Forge, dataset: Path, tmp_path: Path
) -> None:
    """Besides one sum of losses, for spikes; and none on one rank."""
    found = tmp_path / "found.json"
    given = settings(dataset, tmp_path, "run", f"train.micro_batch={24 // world_size}")
    forge.start_work(world_size, "collectives:train_and_count", [str(found), given]).finish()
    calls = json.loads(found.read_text())
    several = world_size > 1
    assert calls["log_on_all_ranks"] == [["_allgather_base_"] * several] * STEPS
    assert calls["rolled_back_after_spikes_on_all_ranks"] == [["allreduce_"] * several] * STEPS
    assert len(metrics(tmp_path / "run")) == STEPS
