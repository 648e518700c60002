"""A pointer to the newest checkpoint that is wrong, a checkpoint that goes while it is read, and a finished run that is
started again.
"""

import json
from pathlib import Path

import pytest
import torch
from saving import CONFIG, save_all

from pipeline import model as models
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.checkpoint.store import Checkpoints
from pipeline.process.console import Console
from pipeline.process.distributed import Ranks
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train import setup

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
FACTS = {"seed": 0, "excluded": "none", "evaluation_excluded": "none"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, the second of which the test may spoil."""
    for step in (10, 20):
        save_all(tmp_path / "run" / "checkpoints", step, identity={"seed": 0}, model=CONFIG.to_dict(), losses=[1.5])
    Checkpoints(tmp_path / "run" / "checkpoints").keep_if_best("step-00000010", "val_loss", 1.0)
    return tmp_path / "run"


# -------------------------------------------------------------------- the pointer
def test_a_pointer_that_a_kill_left_behind_is_repaired(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a run that starts, also a finished one; who reads its weights finds the newest, and writes nothing into its
    folder.
    """
    latest, console = run / "checkpoints" / "latest", Console(run / "log.txt", True)
    latest.write_text("step-00000010")
    setup.find_checkpoint_on_all_ranks(Checkpoints(latest.parent), FACTS, 20, ALONE, console)
    assert latest.read_text() == "step-00000020"

    for left in ("step-00000010", "step-00000099"):
        latest.write_text(left)
        assert models.read_weights(run)[2] == {"step": 20}
        assert latest.read_text() == left
    assert models.read_weights(latest.parent)[2] == {"step": 20}
    latest.unlink()
    assert models.read_weights(run)[2] == {"step": 20}
    assert not latest.exists()
    assert capsys.readouterr().err == ""

    # Not whole: a file is missing. That another one is read is said.
    newest = latest.parent / "step-00000020"
    (newest / "rank-0001.t.bin").unlink()
    assert models.read_weights(run)[2] == {"step": 10}
    assert capsys.readouterr().err == f"note: {newest} is damaged (a file is missing or cut short).\n"


def test_a_checkpoint_that_is_removed_while_it_is_read_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in training keeps few checkpoints."""
    read = json_record.read

    def read_slowly(path: Path, *rest: object) -> object:
        content = read(path, *rest)
        if path.name == "checksums.json":
            Checkpoints(run / "checkpoints").remove(path.parent)
        return content

    monkeypatch.setattr(json_record, "read", read_slowly)
    with pytest.raises(UserError, match=r"model\.safetensors: it is gone\. A run in training removes its older"):
        models.read_weights(run)


# -------------------------------------------------------------------- settings of a run that is finished
def test_a_finished_run_refuses_settings_that_would_have_made_another(run: Path) -> None:
    console, checkpoints = Console(run / "log.txt", True), Checkpoints(run / "checkpoints")
    now = {**schema.defaults(RunConfig), "excluded": "none", "evaluation_excluded": "none", "seed": 0}

    def start(steps: int, **changed: object) -> None:
        settings = {name.replace("__", "."): value for name, value in changed.items()}
        assert settings.keys() <= {*now, "ranks"}
        setup.find_checkpoint_on_all_ranks(checkpoints, {**now, **settings}, steps, ALONE, console)

    start(20)
    start(
        20, track__uri="http://there", train__stop_after_minutes=9, ranks=4, engine__zero_stage=3, data__path="/moved"
    )
    start(40, train__length="40 steps", optimizer__lr=0.1)
    with pytest.raises(
        UserError, match=r"finished, and was another one: optimizer\.lr was 0\.001, is 0\.1\. Set it back"
    ):
        start(20, optimizer__lr=0.1, track__enabled=False)
    with pytest.raises(UserError, match=r"has 20 steps of training, more than train\.length = 15 steps asks for"):
        start(15, train__length="15 steps")
    for steps in (20, 40):
        with pytest.raises(UserError, match=r"cannot be continued: init\.weights was None, is /nonexistent"):
            start(steps, init__weights="/nonexistent")
    for folder in checkpoints.folder.glob("step-*"):
        (folder / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"no checkpoint in .* is intact. Remove that folder"):
        start(20)


def test_a_run_whose_checkpoints_are_left_behind_does_not_begin_anew(run: Path) -> None:
    """It would remove the metrics of what it has trained."""
    given = [f"name={run.name}", f"out={run.parent}", "data.path=d", "train.length=9 steps", "model.name=ViT-Ti/16"]
    moved = schema.load(RunConfig, None, [*given, "checkpoint.folder=elsewhere"])
    with pytest.raises(UserError, match=r"elsewhere.? has no checkpoint of .*, whose newest is .*step-00000020"):
        setup.refuse_checkpoints_elsewhere(moved)
    (run / "run.json").write_text(json.dumps({"facts": {"name": run.name, "checkpoint_folder": "elsewhere"}}))
    setup.refuse_checkpoints_elsewhere(schema.load(RunConfig, None, given))
