"""The fine-tuning protocol: rates chosen on a dev split, final runs on all data, resuming; comparison of its runs."""

import contextlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from child_runs import leave_behind
from forked import Forge
from ranks import metrics
from tiny import make_dataset

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.base.locks import only_writer
from pipeline.checkpoint.store import FORMAT, Counters, State
from pipeline.data.dataset.exclusion import EXCLUDED, write_list
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.mixture.run_data import hold_out, open_run_data
from pipeline.lifecycle.run_folder import RESUME, RUN_FOLDER, refuse_checkpoint_of_another, write_settings
from pipeline.monitor.origin import find_origin
from pipeline.monitor.page_folder import PageFolder, Start
from pipeline.monitor.run_page import RunFacts, WeightsOrigin
from pipeline.process.outputs import holding_outputs
from pipeline.review.reader import from_folder
from pipeline.settings import schema
from pipeline.settings.commands.reports import GridConfig
from pipeline.settings.quantities import Limit
from pipeline.train import setup
from pipeline.train.run_facts import datasets_of
from pipeline.transfer import grid
from pipeline.transfer.child_run import ChildRun, make_child, read_outcome, trained_otherwise
from pipeline.transfer.track.data_names import data_names

ROOT = Path(__file__).resolve().parents[2]
RUN = """
name: x
model: {image_size: 16}
data: {path: DATA, streams: 4, window: 16}
augment: {eval_crop: resize}
train: {length: 12 steps, global_batch: 24, micro_batch: 24, loss: softmax, log_every: 1, max_skipped_steps: 2}
optimizer: {name: sgd, weight_decay: 0}
schedule: {decay: cosine, warmup: 1 steps}
engine: {precision: fp32, peak_tflops: 0.1}
evaluate: {every: 100%}
checkpoint: {every: 100%, best: val_top1}
track: {enabled: false, figures: false}
"""


# A rank of a start whose grid was killed: it has its folder until it has saved.
RANK = """
import sys, time
from pathlib import Path
sys.path[:] = {path!r}
from pipeline.lifecycle.run_folder import RunFolder
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
        assert rank.stdout
        assert rank.stdout.readline() == "locked\n"
        yield rank


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny", {"train": 150, "val": 37})


def test_grid_from_trials_to_table_and_comparison(
    forge: Forge, data: Path, database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.tracking import MlflowClient

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
            f"also=[{data}:train]",
        ],
    )
    started: list[str] = []

    def start(cell: ChildRun, config: GridConfig) -> int:
        started.append(cell.name)
        flat = schema.flatten(schema.to_dict(cell.config))
        run = forge.start(
            1, [f"{name}={json.dumps(v) if isinstance(v, list) else v}" for name, v in flat.items() if v is not None]
        )
        (code,) = run.wait()
        assert code == (2 if cell.name == "lr-1e+18" else 0), run.said()
        return code

    def asked_to_stop(cell: ChildRun, config: GridConfig) -> int:
        return RESUME if cell.name == "lr-0.3" else start(cell, config)

    with pytest.raises(SystemExit) as stopped:
        grid.run(config, asked_to_stop)
    assert stopped.value.code == RESUME
    with pytest.raises(
        UserError, match=r"tiny is a grid that has not ended: results.json is missing. Wait, or continue it"
    ):
        from_folder(tmp_path / "tiny")
    result = grid.run(config, start)
    assert started == ["lr-1e+18", "lr-1e-06", "lr-0.3", "final-seed-3", "final-seed-4"], (
        "what is finished is not run again"
    )
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
    also = result["also"][f"{data}:train"]
    assert (also["num_samples"], len(also["of_seeds"])) == (150, 2)
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(result))
    page = (folder / "report.md").read_text()
    assert f"{100 * result['top1']:.2f} ± {100 * result['std']:.2f}" in page
    assert "| **0.3** |" in page
    assert "| 1e+18 | diverged | - |" in page

    # The same command again runs nothing; another length of the runs is another grid.
    assert grid.run(config, start)["runs"] == result["runs"]
    assert len(started) == 5
    cell = grid.make_run(config, "final-seed-3", 0.3, 3, 0.0)
    assert read_outcome(cell) is not None
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
    assert read_outcome(grid.make_run(longer, "final-seed-3", 0.3, 3, 0.0)) is None

    # One of the seeds alone has no deviation, neither here nor in MLflow, where two have one.
    shutil.copy(database, tmp_path / "mlflow.db")
    sent = replace(config, also=[], mlflow=f"sqlite:///{tmp_path / 'mlflow.db'}")
    client = MlflowClient(tracking_uri=sent.mlflow)

    def metrics_sent() -> dict[str, float]:
        (run,) = client.search_runs([client.get_experiment_by_name("vit").experiment_id])
        assert run.data.tags["kind"] == "grid"
        return run.data.metrics

    capsys.readouterr()
    alone = grid.run(replace(sent, seeds=[3]), start)
    assert metrics_sent() == {"top1": accuracies[0], "score": 100 * accuracies[0], "best_lr": 0.3, "runs_done": 4}
    assert (alone["top1"], alone["std"]) == (accuracies[0], None)
    assert f" % top-1, 1 seed; report: {folder / 'report.md'}\n" in capsys.readouterr().out
    page = (folder / "report.md").read_text()
    assert f"| {data}, val | {100 * accuracies[0]:.2f} | 37 |" in page
    assert "deviation" not in page
    # Data sets whose folders have one name; a third has the images of the second, and its classes in another order.
    other = make_dataset(tmp_path / "other" / "tiny", {"train": 20})
    both = [f"{data}:train", f"{other}:train"]
    reordered = f"{make_dataset(tmp_path / 'reordered', {'train': 20}, order=[1, 2, 3, 0])}:train"
    named = grid.run(replace(sent, also=[*both, reordered]), start)
    assert named["also"][reordered] == named["also"][both[1]]
    assert [named["also"][entry]["num_samples"] for entry in both] == [150, 20]
    assert named["also"][reordered]["top1"] > 0.5
    found = metrics_sent()
    assert found["top1_std"] == result["std"]
    assert found[f"top1_{data.parent.name}_tiny_train"] == named["also"][both[0]]["top1"]
    assert found["top1_other_tiny_train"] == named["also"][both[1]]["top1"]
    for name, entry in ((f"{data.parent.name}_tiny", both[0]), ("other_tiny", both[1])):
        report = folder / "final-seed-3" / "evaluate" / f"{name}-train" / "scores.json"
        assert json.loads(report.read_text())["top1"] == named["also"][entry]["of_seeds"][0]
    assert len(started) == 5

    # Damaged scores are said, and that run, which is trained already, is evaluated again.
    scores_file = folder / "final-seed-3" / "scores.json"
    records = (folder / "final-seed-3" / "metrics.jsonl").read_text()
    scores_file.write_text(scores_file.read_text()[:20])
    capsys.readouterr()
    assert grid.run(config, start)["runs"] == result["runs"]
    assert f"{scores_file} is not valid JSON" in capsys.readouterr().out
    assert started[5:] == ["final-seed-3"]
    assert (folder / "final-seed-3" / "metrics.jsonl").read_text() == records


def test_weights_that_train_on_between_trials_are_refused(data: Path, tmp_path: Path) -> None:
    """init.weights names a run in training: each trial began with the checkpoint that was the newest then."""
    (tmp_path / "run.yaml").write_text(RUN.replace("DATA", str(data)))
    settings = [
        f"run={tmp_path}/run.yaml",
        "name=tiny",
        f"out={tmp_path}",
        "settings=[init.weights=base]",
        "lr=[0.1,0.2]",
        "seeds=[3]",
        "dev_share=0.2",
    ]
    steps = iter((100, 100, 200))

    def start(cell: ChildRun, config: GridConfig) -> int:
        origin = WeightsOrigin(f"base/step-{(step := next(steps))}", sha256=f"{step}", step=step)
        PageFolder(cell.folder).begin("vit", RunFacts(cell.name, "finetune", origin=origin), Start(0.0, 0, []))
        return leave_behind(cell, "finetune", 0.5)

    with pytest.raises(UserError, match=r"lr-0.1 with base/step-100 and .*final-seed-3 with base/step-200, so their"):
        grid.run(schema.load(GridConfig, None, settings), start)


def test_an_ended_run_of_other_data_or_weights_is_not_taken_for_one_of_todays(data: Path, tmp_path: Path) -> None:
    """The same command printed the scores of the data and the weights of before as those of today's."""
    weights, here = tmp_path / "start.pt", shutil.copytree(data, tmp_path / "data")
    (tmp_path / "run.yaml").write_text(RUN.replace("DATA", str(here)))
    settings = [
        f"run={tmp_path}/run.yaml",
        "name=tiny",
        f"out={tmp_path}",
        f"settings=[init.weights={weights}]",
        "lr=[0.1,0.2]",
        "seeds=[3]",
        "dev_share=0.2",
    ]
    config = schema.load(GridConfig, None, settings)

    def start(cell: ChildRun, config: GridConfig) -> int:
        data = open_run_data(cell.config.data, cell.config.seed, cell.config.train.global_batch, cell.config.labels)
        origin = find_origin(weights, str(weights))
        facts = RunFacts(cell.name, "finetune", datasets=tuple(datasets_of(data)), origin=origin)
        PageFolder(cell.folder).begin("vit", facts, Start(0.0, 0, []))
        return leave_behind(cell, "finetune", 0.5)

    def refused(said: str) -> None:
        with pytest.raises(UserError, match=rf"tiny/lr-0\.1 has ended, and would be another run now: {said}") as error:
            grid.run(config, lambda *_: pytest.fail("started"))
        assert str(error.value).endswith(". Start another grid with name=..., or put back what it began with.")

    weights.write_bytes(b"before")
    assert grid.run(config, start)["top1"] == 0.5
    weights.write_bytes(b"after")
    refused(r".*start\.pt had the SHA-256 [0-9a-f]{16}, and .*start\.pt has [0-9a-f]{16}")
    weights.unlink()  # Nothing is known of them.
    assert grid.run(config, lambda *_: pytest.fail("started"))["top1"] == 0.5
    dataset = open_dataset(here)
    reason = {"split": "train", "row": 7, "key": dataset.split("train").keys([7])[0], "reason": "a copy"}
    listed = write_list(dataset, "copies", pa.Table.from_pylist([reason], EXCLUDED))
    refused("data, split train, was .* with 120 images, excluded 30 samples .* with 119 images, excluded 31 samples")
    assert isinstance(listed, Path)
    listed.unlink()
    shutil.rmtree(here)
    make_dataset(here, {"train": 150, "val": 37}, seed=1)
    refused(f"data, split train, was {dataset.fingerprint} with 120 images, excluded 30 samples")


def test_a_run_is_not_trained_partly_with_other_settings(data: Path, tmp_path: Path) -> None:
    """With another best rate, or length, it went on from its checkpoint, and was reported as trained with that from the beginning."""
    (tmp_path / "run.yaml").write_text(RUN.replace("DATA", str(data)))
    settings = [f"run={tmp_path}/run.yaml", "name=tiny", f"out={tmp_path}", "seeds=[3,4]", "dev_share=0.2"]
    final = tmp_path / "tiny" / "final-seed-3"

    def load(lr: list[float], *more: str) -> GridConfig:
        return schema.load(
            GridConfig, None, [*settings, f"lr={lr}", f"settings=[{','.join(('init.weights=x', *more))}]"]
        )

    def start(cell: ChildRun, config: GridConfig) -> int:
        leave_behind(cell, "finetune", 1 - cell.config.optimizer.lr)
        if cell.folder == final:  # Killed before it has a checkpoint.
            (final / "status.json").write_text('{"status": "running", "step": 0, "code": -1, "reason": ""}')
        return RESUME if cell.folder == final else 0

    def refused(config: GridConfig, *said: str) -> None:
        with pytest.raises(UserError) as error:
            grid.run(config, start)
        assert all(f"{tmp_path}/tiny/{text}" in str(error.value) for text in said), error.value
        assert str(error.value).startswith("Runs of this grid were trained with other settings: ")

    with pytest.raises(SystemExit):
        grid.run(load([0.2]), start)
    with pytest.raises(SystemExit):  # Nothing is trained yet.
        grid.run(load([0.2, 0.1]), start)
    (final / "checkpoints" / "step-00000004").mkdir(parents=True)
    refused(load([0.2, 0.1, 0.05]), "final-seed-3 (optimizer.lr was 0.1, is 0.05)")
    for lr in (0.2, 0.1):
        (tmp_path / "tiny" / f"lr-{lr:g}" / "checkpoints" / ".writing-step-00000004").mkdir(parents=True)
    longer = "train.length was 12 steps, is 13 steps"
    refused(load([0.2, 0.1], "train.length=13 steps"), f"lr-0.2 ({longer})", f"lr-0.1 ({longer})")
    with pytest.raises(SystemExit):  # Its memory may be too small for that of before.
        grid.run(load([0.2, 0.1], "train.micro_batch=12"), start)


def test_settings_that_a_run_was_trained_with_are_found_wherever_they_are_left(data: Path, tmp_path: Path) -> None:
    """With config.yaml damaged, or the checkpoints moved to another checkpoint.folder, a run went on with another rate."""
    (tmp_path / "run.yaml").write_text(RUN.replace("DATA", str(data)))

    def cell(lr: float, *more: str) -> ChildRun:
        weights = f"init.weights={tmp_path}/weights"
        return make_child(
            "cell", str(tmp_path / "run.yaml"), ["name=cell", f"out={tmp_path}", weights, f"optimizer.lr={lr}", *more]
        )

    run, other, changed = cell(0.1), cell(0.2), "optimizer.lr was 0.1, is 0.2"
    leave_behind(run, "finetune", 0.5)
    config, step = run.folder / "config.yaml", run.folder / "checkpoints" / "step-00000004"
    good = config.read_text()
    invalid = schema.to_dict(run.config) | {"optimizer": {"name": "none"}}
    for damaged in ("{", json.dumps(invalid), None):
        config.unlink(missing_ok=True)
        if damaged:
            config.write_text(damaged)
        assert trained_otherwise(other) == ""  # Without a checkpoint, it begins anew.
        step.mkdir(parents=True)
        with pytest.raises(UserError) as error:
            trained_otherwise(run)
        assert str(error.value).startswith(str(config))
        assert str(error.value).endswith(f" tells the run's settings either: remove {run.folder} to train it again.")
        identity = objectives.flat_settings(run.config) | {"fingerprint": "0", "ranks": 1, "left_out.train.list": 3}
        state = State(4, identity, engine=Counters(4, 4, 0))
        (step / "state.json").write_text(json.dumps({"format": FORMAT, **asdict(state)}))
        assert trained_otherwise(run) == ""  # As pretrain would: the checkpoint tells its settings.
        assert trained_otherwise(other) == changed
        shutil.rmtree(step.parent)
    config.write_text(good)
    elsewhere = f"checkpoint.folder={tmp_path}/large"
    (tmp_path / "large" / "cell" / "step-00000004").mkdir(parents=True)
    assert trained_otherwise(other) == ""
    assert trained_otherwise(cell(0.1, elsewhere)) == ""
    assert trained_otherwise(cell(0.2, elsewhere)) == f"{changed}; with checkpoints in {tmp_path}/large/cell"
    moved = cell(0.1, elsewhere).config
    write_settings(moved, run.folder)
    (run.folder / "run.json").write_text(
        json.dumps({"facts": {"name": "cell", "checkpoint_folder": moved.checkpoint.folder}})
    )
    assert trained_otherwise(other) == f"{changed}; with checkpoints in {tmp_path}/large/cell"


def test_a_dev_split_is_a_part_that_only_the_seed_decides(data: Path) -> None:
    train = open_dataset(data).split("train")
    rest, dev = hold_out(train, 0.2, seed=0)
    keys = {name: split.keys(np.arange(len(split))) for name, split in {"rest": rest, "dev": dev, "all": train}.items()}
    assert (len(rest), len(dev), dev.name) == (120, 30, "dev")
    assert sorted(keys["rest"] + keys["dev"]) == sorted(keys["all"])
    assert keys["dev"] != train.keys(np.arange(30))
    labels = dict(zip(keys["all"], train.label_values.tolist(), strict=True))
    assert dev.label_values.tolist() == [labels[key] for key in keys["dev"]]
    smaller = hold_out(train, 0.1, seed=0)[1]
    assert set(smaller.keys(np.arange(15))) < set(keys["dev"])
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
    assert grid.best_rate(tried) == (3.0, 9)
    with pytest.raises(UserError, match=r"every learning rate diverged; of the first: 4 steps were skipped\."):
        grid.best_rate(tried[3:])
    assert grid.mean_and_deviation([0.9, 0.92, 0.94]) == {"top1": pytest.approx(0.92), "std": pytest.approx(0.02)}
    assert grid.mean_and_deviation([0.9]) == {"top1": 0.9, "std": None}


def test_names_of_data_sets_tell_them_apart() -> None:
    def metrics_of(*entries: str) -> list[str]:
        return [name.metric for name in data_names(entries).values()]

    assert metrics_of("a/x:val", "b/y:test", "b/z") == ["x_val", "y_test", "z"]
    assert metrics_of("a/x:val", "b/x:val", "a/x:test", "y") == ["a_x_val", "b_x_val", "a_x_test", "y"]
    assert metrics_of("x:val", "/b/x:val", "c/b/x:val") == ["x_val", "_b_x_val", "c_b_x_val"]
    assert metrics_of("x_val:test", "a/x:val_test") == ["x_val_test", "a_x_val_test"]
    assert metrics_of("s3://one/x?region=eu-west-1", "gs://two/x") == ["one_x", "two_x"]
    assert metrics_of("photos (2):val", "a/std") == ["photos _2__val", "a_std"]
    # The report of a data set without a split is that of val.
    assert metrics_of("a/x:val", "b/x") == ["a_x_val", "b_x"]
    with pytest.raises(UserError, match=r"^also"):
        data_names(("s3://a/x", "gs://a/x"))


def test_what_only_the_final_runs_read_is_looked_at_first(data: Path, tmp_path: Path) -> None:
    weights, file, other = tmp_path / "start.pt", tmp_path / "run.yaml", tmp_path / "other"
    models.save(models.create("ViT-mu/4", 16, 5), weights)
    file.write_text(RUN.replace("DATA", str(data)).replace(", best: val_top1", ""))
    moved = tmp_path / "moved"
    for path, classes in ((other, list("abcde")), (moved, ["class1", "class0", "dog", "cat"])):
        make_dataset(path, {"train": 20})
        info = json.loads((path / "dataset.json").read_text())
        info |= {"checksum": None, "num_classes": len(classes), "classes": classes}
        (path / "dataset.json").write_text(json.dumps(info))

    def start(cell: ChildRun, config: GridConfig) -> int:
        pytest.fail(f"{cell.name} was started")

    for wrong, line in {
        "settings=[init.weights=x,data.eval_split=train]": "data.eval_split = train is trained on, but the final runs",
        "settings=[init.weights=x,train.loss=mae]": "train.loss = mae predicts no classes",
        f"also=[{other}:train]": f"also: {other}:train has 5 classes, {data} has 4",
        f"also=[{moved}:train]": f"also: 'class1' is class 0 of {moved}:train, and class 1 of {data}",
        f"settings=[init.weights=x,'data.mix=[{{path: {moved}, split: val, weight: 1}}]']": f"data.mix, {moved}: .* has no split",
    }.items():
        overrides = [
            f"run={file}",
            "name=tiny",
            f"out={tmp_path}",
            f"settings=[init.weights={weights}]",
            "lr=[0.1]",
            wrong,
        ]
        with pytest.raises(UserError, match=line):
            grid.run(schema.load(GridConfig, None, overrides), start)


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
        (written.replace("db.example", "other.example"), True),
        (written.replace("stop_after_minutes: 0.0", "stop_after_minutes: 9.0"), True),
        (written.replace("zero_stage: 1", "zero_stage: 2"), False),
        (written.replace("\nseed: 0", "\nseed: 1"), False),
    ):
        (cell.folder / "config.yaml").write_text(content)
        assert (read_outcome(cell) is not None) == is_found
    (cell.folder / "config.yaml").write_text(written)
    (cell.folder / "scores.json").write_text('{"step": 12, "top1": 0.0, "loss": null, "num_samples": 37}')
    assert "no finite loss" in str(read_outcome(cell)), "it counts as diverged, instead of being run again without end"


def test_runs_of_two_grids_do_not_go_on_from_each_others_checkpoints(data: Path, tmp_path: Path) -> None:
    """With one checkpoint.folder, runs of the same name have the same place. Begun together, the second went on from the first's."""
    (tmp_path / "run.yaml").write_text(RUN.replace("DATA", str(data)))

    def cell(of: str, lr: float) -> ChildRun:
        given = [f"out={tmp_path}/{of}", "init.weights=x", f"optimizer.lr={lr}", f"checkpoint.folder={tmp_path}/large"]
        return make_child("lr-0.1", str(tmp_path / "run.yaml"), ["name=lr-0.1", *given])

    first, second = cell("a", 0.1), cell("b", 0.2)
    for run in (first, second):
        leave_behind(run, "finetune", 0.5)
        (run.folder / "status.json").write_text('{"status": "stopped", "step": 4, "code": 75, "reason": ""}')
    step = tmp_path / "large" / "lr-0.1" / "step-00000004"
    step.mkdir(parents=True)
    then, now = (objectives.flat_settings(run.config) for run in (first, second))
    (step / "state.json").write_text(json.dumps({"format": FORMAT, **asdict(State(4, then, engine=Counters(4, 4, 0)))}))
    refused = (
        rf"step-00000004 is of the run {tmp_path}/a/lr-0\.1, whose .* the same place\. Choose another checkpoint\.f"
    )
    with pytest.raises(UserError, match=refused):
        trained_otherwise(second)
    with pytest.raises(UserError, match=refused):
        setup._compare(step, now, 12)
    assert trained_otherwise(first) == ""
    relative = then | {"out": "runs", RUN_FOLDER: str(first.folder)}  # Its `out` began in another folder.
    with pytest.raises(UserError, match=refused):
        refuse_checkpoint_of_another(step, relative, now | {"out": "runs"})
    (tmp_path / "link").symlink_to(first.folder.parent)
    refuse_checkpoint_of_another(step, then, then | {"out": str(tmp_path / "link")})
    first.folder.rename(tmp_path / "moved")
    said = f"optimizer.lr was 0.1, is 0.2; with checkpoints in {step.parent}"
    assert trained_otherwise(second) == said


def test_a_run_that_a_killed_grid_left_is_waited_for(data: Path, tmp_path: Path) -> None:
    """Its ranks save and end when the grid is killed. The same command, given at once, was refused because of them."""
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("DATA", str(data)))
    config = schema.load(
        GridConfig, None, [f"run={file}", "name=tiny", f"out={tmp_path}", "settings=[init.weights=x]", "lr=[0.1]"]
    )
    cell = grid.make_run(config, "final", 0.1, 0, 0.0)
    with run_that_ends(cell.folder) as left:

        def start(cell: ChildRun, config: GridConfig) -> int:
            assert left.poll() == 0
            return leave_behind(cell, "finetune", 0.5)

        assert grid.run_to_end(cell, config, start)["top1"] == 0.5


def test_a_second_grid_in_a_folder_is_refused(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("DATA", str(data)))
    config = schema.load(
        GridConfig, None, [f"run={file}", "name=tiny", f"out={tmp_path}", "settings=[init.weights=x]", "lr=[0.1]"]
    )
    command = runpy.run_path(str(ROOT / "launch" / "finetune_grid.py"))["finetune_grid"]
    with (
        only_writer(tmp_path / "tiny"),
        holding_outputs(),
        pytest.raises(UserError, match=rf"^{tmp_path}/tiny is being written by "),
    ):
        command(config)


def test_what_a_kill_leaves_of_two_reports_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report of more seeds stood beside the results of fewer, if a grid was killed in between."""
    config = schema.load(GridConfig, None, ["run=x.yaml", "name=tiny", f"out={tmp_path}", "lr=[0.1]"])
    score = {"top1": 0.5, "std": None, "num_samples": 9}
    trials = [{"lr": 0.1, "top1": 0.5, "loss": 1.0, "num_samples": 9}]
    runs = [{"seed": 0, "top1": 0.5, "num_samples": 9}]
    about = {
        "run": "x.yaml",
        "settings": [],
        "weights": "w",
        "data": "d",
        "split": "val",
        "lr": 0.1,
        "dev_share": 0.1,
        "num_train": 9,
        "trained_by": "",
    }
    results = {**about, **score, "trials": trials, "runs": runs, "also": {}}
    grid._write_report(results, config)
    replace_file = os.replace

    def killed(source: Path, target: Path) -> None:
        replace_file(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        grid._write_report(results, config)
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["report.md"]
