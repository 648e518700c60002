"""The fine-tuning protocol: rates chosen on a dev split, final runs on all data, resuming; comparison of its runs."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from child_runs import instead_of_commands, leave_behind
from forked import Forge
from ranks import metrics
from tiny import make_dataset

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.base.locks import only_writer
from pipeline.cluster.status_files import RESUME, RUN_FOLDER, refuse_checkpoint_of_another, write_settings
from pipeline.data.dataset.exclusion import EXCLUDED, write_list
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.mixture.run_data import hold_out
from pipeline.experiment import grid
from pipeline.experiment.spec import RunSpec, make_spec, row_of, run_spec
from pipeline.monitor.page_folder import PageFolder, Start
from pipeline.monitor.run_page import RunFacts, WeightsOrigin
from pipeline.process.outputs import holding_outputs
from pipeline.review.record import from_folder
from pipeline.settings import schema
from pipeline.settings.commands.reports import GridConfig
from pipeline.settings.quantities import Limit

RUN = """
name: x
model: {image_size: 16}
data: {path: DATA, streams: 4, window: 16}
augment: {eval_crop: resize}
train: {length: 12 steps, global_batch: 24, micro_batch: 24, loss: softmax, log_every: 1, max_skipped_steps: 2}
optimizer: {name: sgd, weight_decay: 0}
schedule: {decay: cosine, warmup: 1 steps}
engine: {precision: fp32}
evaluate: {every: 100%}
checkpoint: {every: 100%, best: val_top1}
track: {enabled: false, figures: false}
"""


# A rank of a start whose grid was killed: it has its folder until it has saved.
RANK = """
import sys, time
from pathlib import Path
sys.path[:] = {path!r}
from pipeline.cluster.status_files import RunFolder
folder = RunFolder(Path(sys.argv[1]), 0)
assert folder.lock() is None
print("locked", flush=True)
time.sleep(2)
"""


@contextlib.contextmanager
def run_that_ends(folder: Path) -> Iterator[subprocess.Popen[str]]:
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK.format(path=sys.path), str(folder)], stdout=subprocess.PIPE, text=True
    )
    with rank:
        assert rank.stdout.readline() == "locked\n"
        yield rank


@pytest.fixture
def data(dataset: Path) -> Path:
    return dataset


def test_grid_from_trials_to_table_and_comparison(
    forge: Forge,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, file = tmp_path / "start.pt", tmp_path / "run.yaml"
    models.save(models.create("ViT-mu/4", 16, 5), weights)
    file.write_text(RUN.replace("DATA", str(data)))
    config = schema.load(
        GridConfig,
        None,
        [
            f"run={file}",
            "name=tiny",
            f"out={tmp_path}",
            f"settings=[init.weights={weights}]",
            "lr=[1e18,1e-6,0.3]",
            "seeds=[3,4]",
            "dev_share=0.2",
        ],
    )
    started: list[str] = []

    def start(cell: RunSpec) -> int:
        started.append(cell.name)
        flat = schema.flatten(schema.to_dict(cell.config))
        run = forge.start(
            1, [f"{name}={json.dumps(v) if isinstance(v, list) else v}" for name, v in flat.items() if v is not None]
        )
        (code,) = run.wait()
        assert code == (2 if cell.name == "lr-1e+18" else 0), run.said()
        return code

    def asked_to_stop(cell: RunSpec) -> int:
        return RESUME if cell.name == "lr-0.3" else start(cell)

    instead_of_commands(monkeypatch, asked_to_stop)
    with pytest.raises(SystemExit) as stopped:
        grid.run(config)
    assert stopped.value.code == RESUME
    with pytest.raises(UserError, match=r"tiny is not the folder of a run, or of an experiment that has ended"):
        from_folder(tmp_path / "tiny")
    instead_of_commands(monkeypatch, start)
    result = grid.run(config)
    assert result
    assert started == [
        "lr-1e+18",
        "lr-1e-06",
        "lr-0.3",
        "final-seed-3",
        "final-seed-4",
    ], "what is finished is not run again"
    folder = tmp_path / "tiny"

    # Trials: on 30 of the 150 that they do not train on.
    astray, *trials = result["trials"]
    assert [(trial["lr"], trial["num_samples"]) for trial in trials] == [(1e-6, 30), (0.3, 30)]
    assert trials[0]["top1"] < trials[1]["top1"]
    assert astray["lr"] == 1e18
    assert "more than train.max_skipped_steps = 2" in astray["diverged"]
    for trial, name in zip(trials, ("lr-1e-06", "lr-0.3"), strict=True):
        assert metrics(folder / name, "dev_top1")[12] == trial["top1"]
    assert "(2.4 epochs of 120)" in (folder / "lr-0.3" / "log.txt").read_text()
    # Final runs: on all of train, tested on val.
    assert result["lr"] == 0.3
    assert "(1.9 epochs of 150)" in (folder / "final-seed-3" / "log.txt").read_text()
    accuracies = [metrics(folder / f"final-seed-{seed}", "val_top1")[12] for seed in (3, 4)]
    assert [run["top1"] for run in result["runs"]] == accuracies
    assert result["top1"] == pytest.approx(np.mean(accuracies))
    assert result["std"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2**0.5)
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(result))
    page = (folder / "report.md").read_text()
    assert f"{100 * result['top1']:.2f} ± {100 * result['std']:.2f}" in page
    assert "| **0.3** |" in page
    assert "| 1e+18 | diverged | - |" in page

    # The same command again runs nothing; another length of the runs is another grid.
    assert grid.run(config)["runs"] == result["runs"]
    assert len(started) == 5
    cell = grid.make_run(config, "final-seed-3", 0.3, 3, 0.0)
    assert row_of(cell).state == "done"
    longer = schema.load(
        GridConfig,
        None,
        [
            f"run={file}",
            "name=tiny",
            f"out={tmp_path}",
            "lr=[0.3]",
            f"settings=[init.weights={weights},train.length=13 steps]",
        ],
    )
    with pytest.raises(UserError, match=r"train\.length was 12 steps, is 13 steps in"):
        grid.run(longer)

    # One of the seeds alone has no deviation.
    alone = grid.run(replace(config, seeds=[3]))
    assert (alone["top1"], alone["std"]) == (accuracies[0], None)
    page = (folder / "report.md").read_text()
    assert f"| {data}, val | {100 * accuracies[0]:.2f} | 37 |" in page
    assert "deviation" not in page

    # Damaged scores are said, and that run, which is trained already, is evaluated again.
    scores_file = folder / "final-seed-3" / "scores.json"
    records = (folder / "final-seed-3" / "metrics.jsonl").read_text()
    scores_file.write_text(scores_file.read_text()[:20])
    capsys.readouterr()
    assert grid.run(config)["runs"] == result["runs"]
    assert f"{scores_file} is not valid JSON" in capsys.readouterr().out
    assert started[5:] == ["final-seed-3"]
    assert (folder / "final-seed-3" / "metrics.jsonl").read_text() == records


def configured(data: Path, tmp_path: Path, *settings: str, weights: str = "x") -> GridConfig:
    (tmp_path / "run.yaml").write_text(RUN.replace("DATA", str(data)))
    given = [f"run={tmp_path}/run.yaml", "name=tiny", f"out={tmp_path}", "seeds=[3]", "dev_share=0.2", "lr=[0.1,0.2]"]
    if not any(setting.startswith("settings=") for setting in settings):
        given.append(f"settings=[init.weights={weights}]")
    return schema.load(GridConfig, None, [*given, *settings])


def test_weights_that_train_on_between_trials_are_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init.weights names a run in training: each trial began with the checkpoint that was the newest then."""
    steps = iter((100, 100, 200))

    def start(cell: RunSpec) -> int:
        origin = WeightsOrigin(f"base/step-{(step := next(steps))}", sha256=f"{step}", step=step)
        PageFolder(cell.folder).begin("vit", RunFacts(cell.name, "finetune", origin=origin), Start(0.0, 0, []))
        return leave_behind(cell, "finetune", 0.5)

    instead_of_commands(monkeypatch, start)
    with pytest.raises(UserError, match=r"lr-0.2 with 100 and .*final-seed-3 with 200"):
        grid.run(configured(data, tmp_path, weights="base"))


def test_an_ended_run_of_other_data_or_weights_is_not_taken_for_one_of_todays(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command printed the scores of the data and the weights of before as those of today's."""
    weights, here = tmp_path / "start.pt", shutil.copytree(data, tmp_path / "data")
    config = configured(here, tmp_path, weights=str(weights))
    instead_of_commands(monkeypatch, lambda cell: leave_behind(cell, "finetune", 0.5))

    def score() -> float:
        result = grid.run(config)
        return float(result["top1"])

    def refused(said: str) -> None:
        with pytest.raises(UserError, match=rf"tiny holds another experiment: {said}"):
            grid.run(config)

    weights.write_bytes(b"before")
    assert score() == 0.5
    instead_of_commands(monkeypatch, lambda _: pytest.fail("started"))
    weights.write_bytes(b"after")
    refused(r"the SHA-256 of .*start\.pt was [0-9a-f]{64}, is [0-9a-f]{64}")
    weights.unlink()  # Nothing is known of them.
    assert score() == 0.5
    dataset = open_dataset(here)
    reason = {"split": "train", "row": 7, "key": dataset.split("train").keys([7])[0], "reason": "a copy"}
    listed = write_list(dataset, "copies", pa.Table.from_pylist([reason], EXCLUDED))
    refused(r"data:train \(training\) was .* without none, is .* without 1 samples")
    listed.unlink()
    shutil.rmtree(here)
    make_dataset(here, {"train": 150, "val": 37}, seed=1)
    refused(rf"data:train \(training\) was {dataset.fingerprint} without none")


def test_a_run_is_not_trained_partly_with_other_settings(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another best rate, or length, it went on from its checkpoint, and was reported as trained with that from the
    beginning.
    """
    final = tmp_path / "tiny" / "final-seed-3"

    def start(cell: RunSpec) -> int:
        leave_behind(cell, "finetune", 1 - cell.config.optimizer.lr)
        if cell.folder == final:
            (final / "status.json").write_text('{"status": "running", "step": 4, "code": -1, "reason": ""}')
        return RESUME if cell.folder == final else 0

    instead_of_commands(monkeypatch, start)
    with pytest.raises(SystemExit):
        grid.run(configured(data, tmp_path))
    # What says so is experiment.json, whatever became of the files of the run.
    (final / "config.yaml").unlink()
    for change, said in (
        ("lr=[0.2,0.1,0.05]", "optimizer.lr was 0.1, is 0.05 in final-seed-3"),
        ("settings=[init.weights=x,train.length=13 steps]", "train.length was 12 steps, is 13 steps in lr-0.1"),
        ("settings=[init.weights=x,train.global_batch=12]", "train.global_batch was 24, is 12 in lr-0.1"),
    ):
        with pytest.raises(UserError, match=rf"tiny holds another experiment: .*{re.escape(said)}"):
            grid.run(configured(data, tmp_path, change))
    with pytest.raises(SystemExit):
        grid.run(configured(data, tmp_path, "settings=[init.weights=x,train.stop_after_minutes=9]"))


def test_a_dev_split_is_a_part_that_only_the_seed_decides(data: Path) -> None:
    train = open_dataset(data).split("train")
    rest, dev = hold_out(train, 0.2, seed=0)
    keys = {name: split.keys(np.arange(len(split))) for name, split in {"rest": rest, "dev": dev, "all": train}.items()}
    assert (len(rest), len(dev), dev.name) == (120, 30, "dev")
    assert sorted(keys["rest"] + keys["dev"]) == sorted(keys["all"])
    assert keys["dev"] != train.keys(np.arange(30))
    labels = dict(zip(keys["all"], train.label_values.tolist(), strict=True))
    assert dev.label_values.tolist() == [labels[key] for key in keys["dev"]]
    assert hold_out(train, 0.2, seed=1)[1].keys(np.arange(30)) != keys["dev"]
    # Of what a limit leaves.
    limited = open_dataset(data).split("train", limit=Limit.parse(50), seed=0)
    rest, dev = hold_out(limited, 0.2, seed=0)
    chosen = set(limited.keys(np.arange(50)))
    assert set(rest.keys(np.arange(40))) | set(dev.keys(np.arange(10))) == chosen
    for share in (0.001, 0.999):
        with pytest.raises(UserError, match=r"data\.dev_share"):
            hold_out(train, share, seed=0)


def test_the_best_rate_is_the_most_accurate_then_the_one_of_least_loss() -> None:
    tried = [
        {"lr": 1.0, "top1": 0.5, "loss": 2.0, "num_samples": 9},
        {"lr": 2.0, "top1": 0.7, "loss": 1.5, "num_samples": 9},
        {"lr": 3.0, "top1": 0.7, "loss": 1.4, "num_samples": 9},
        {"lr": 4.0, "diverged": "4 steps were skipped."},
    ]
    assert grid.best_rate(tried) == 3.0
    with pytest.raises(UserError, match=r"every learning rate diverged; of the first: 4 steps were skipped\."):
        grid.best_rate(tried[3:])
    several = grid.summary_of([0.9, 0.92, 0.94], 1000)
    assert (several["top1"], several["std"]) == (pytest.approx(0.92), pytest.approx(0.02))
    assert several["interval"] == pytest.approx([0.92 - 4.302653 * 0.02 / 3**0.5, 0.92 + 4.302653 * 0.02 / 3**0.5])
    assert grid.summary_of([0.9], 1000) == {"top1": 0.9, "std": None, "interval": None}


def test_what_only_the_final_runs_read_is_looked_at_first(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead_of_commands(monkeypatch, lambda run: pytest.fail(f"{run.name} was started"))
    for wrong, line in {
        "data.eval_split=train": "data.eval_split = train is trained on, but the final runs",
        "train.loss=mae": "train.loss = mae predicts no classes",
    }.items():
        with pytest.raises(UserError, match=line):
            grid.run(configured(data, tmp_path, f"settings=[init.weights=x,checkpoint.best=,{wrong}]"))


def test_a_finished_run_is_found_again_wherever_it_was_sent_to(data: Path, tmp_path: Path) -> None:
    file, uri = tmp_path / "run.yaml", "postgresql://ada:secret@db.example.org/mlflow"
    file.write_text(RUN.replace("DATA", str(data)))
    settings = [f"run={file}", "name=tiny", f"out={tmp_path}", f"settings=[init.weights=x,track.uri={uri}]", "lr=[0.1]"]
    cell = grid.make_run(schema.load(GridConfig, None, settings), "final", 0.1, 0, 0.0)
    cell.folder.mkdir(parents=True)
    write_settings(cell.config, cell.folder)
    written = (cell.folder / "config.yaml").read_text()
    (cell.folder / "status.json").write_text('{"status": "finished", "step": 12, "code": 0, "reason": ""}')
    (cell.folder / "scores.json").write_text('{"step": 12, "top1": 0.5, "loss": 1.25, "num_samples": 37}')
    for content, is_found in (
        (written, True),
        (written.replace("secret", "***"), True),
        (written.replace("stop_after_minutes: 0.0", "stop_after_minutes: 9.0"), True),
        (written.replace("\nseed: 0", "\nseed: 1"), False),
    ):
        (cell.folder / "config.yaml").write_text(content)
        assert (row_of(cell).state == "done") == is_found
    (cell.folder / "config.yaml").write_text(written)
    (cell.folder / "scores.json").write_text('{"step": 12, "top1": 0.0, "loss": null, "num_samples": 37}')
    assert row_of(cell).state == "diverged", "instead of being run again without end"


def test_runs_of_two_grids_do_not_go_on_from_each_others_checkpoints(data: Path, tmp_path: Path) -> None:
    """With one checkpoint.folder, runs of the same name have the same place. Begun together, the second went on from
    the first's.
    """
    (tmp_path / "run.yaml").write_text(RUN.replace("DATA", str(data)))
    given = ["name=lr-0.1", f"out={tmp_path}/a", "init.weights=x", f"checkpoint.folder={tmp_path}/large"]
    run = make_spec("lr-0.1", "finetune", str(tmp_path / "run.yaml"), given)
    leave_behind(run, "finetune", 0.5)
    then = objectives.flat_settings(run.config) | {RUN_FOLDER: str(run.folder)}
    for out in (f"{tmp_path}/b", "runs"):
        with pytest.raises(UserError, match=rf"is of the run {tmp_path}/a/lr-0\.1, whose checkpoints have the same"):
            refuse_checkpoint_of_another("step-4", then, then | {"out": out})
    (tmp_path / "link").symlink_to(tmp_path / "a")
    refuse_checkpoint_of_another("step-4", then, then | {"out": str(tmp_path / "link")})


def test_a_run_that_a_killed_grid_left_is_waited_for(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks save and end when the grid is killed. The same command, given at once, was refused because of them."""
    config = configured(data, tmp_path)
    cell = grid.make_run(config, "final", 0.1, 0, 0.0)
    with run_that_ends(cell.folder) as left, open(tmp_path / "output", "wb") as output:

        def start(cell: RunSpec) -> int:
            assert left.poll() == 0
            return leave_behind(cell, "finetune", 0.5)

        instead_of_commands(monkeypatch, start)
        run_spec(cell, config, output)
    assert row_of(cell).state == "done"


def test_a_second_grid_in_a_folder_is_refused(data: Path, tmp_path: Path) -> None:
    config = configured(data, tmp_path)
    with (
        only_writer(tmp_path / "tiny"),
        holding_outputs(),
        pytest.raises(UserError, match=rf"^{tmp_path}/tiny is being written by "),
    ):
        grid.run(config)


def test_the_best_rate_is_found_by_tasks_of_an_array_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead_of_commands(monkeypatch, lambda cell: leave_behind(cell, "finetune", 1 - cell.config.optimizer.lr))
    with pytest.raises(UserError, match="cell = final-seed-3: this run waits"):
        grid.run(configured(data, tmp_path, "cell=final-seed-3"))
    for name in ("lr-0.1", "lr-0.2", "final-seed-3"):
        assert grid.run(configured(data, tmp_path, f"cell={name}")) is None
    instead_of_commands(monkeypatch, lambda _: pytest.fail("started"))
    result = grid.run(configured(data, tmp_path, "report=true"))
    assert (result["lr"], result["top1"]) == (0.1, 0.9)
