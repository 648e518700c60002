"""launch/evaluate.py, from the command line to the folder it writes."""

import csv
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import ROOT
from sklearn import metrics
from sklearn.linear_model import Ridge

from data_tools.check import exclude
from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Dataset
from pipeline.evaluate import score_report
from pipeline.evaluate.intervals import of_samples
from pipeline.evaluate.loaded_model import evaluation_view, output_folder
from pipeline.evaluate.probes.probe import choose_samples
from pipeline.monitor.mlflow.connection import connect
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.settings import schema
from pipeline.settings.commands.data import ExcludeConfig
from pipeline.settings.commands.weights import ScoreConfig
from pipeline.settings.run import TrackConfig

SIDE, K = 8, 6
GREY = (0, 7)  # As `make_dataset` draws classes that a model can tell apart.
OF_REPORT = {"report.md", "report.html"}
CLASSES = ["ant", "bee", "cat|dog", "doe $x_", "eel", "fox"]
# One of every class: any constant prediction for an unreadable image would be correct for one of them.
BAD = {"train": [3], "val": [5, 40, 41, 42, 43, 44]}


@pytest.fixture
def data(make_dataset) -> Dataset:
    rng = np.random.default_rng(0)
    labels = {name: [[int(c)] for c in rng.integers(0, K, n)] for name, n in {"train": 90, "val": 70}.items()}
    for c, row in enumerate(BAD["val"]):
        labels["val"][row] = [c]
    return make_dataset(labels, CLASSES, BAD)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A ViT whose features and head are random."""
    return save(tmp_path / "random.pt", K, classes=CLASSES)


def save(path: Path, num_classes: int, **extra: Any) -> Path:
    model = models.create("ViT-mu/4", SIDE, num_classes, representation=True)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    preprocessing = {"image_size": SIDE, "eval_crop": "resize", "eval_resize": 0}
    models.save(model, path, {"preprocessing": preprocessing, "loss": "sigmoid", "run": "try", "step": 1000, **extra})
    return path


def command(*settings: str) -> list[str]:
    return [str(ROOT / "launch" / "evaluate.py"), "device=cpu", "max_bad_share=0.1", *settings]


def config(weights: Path, data: Dataset, *more: str) -> ScoreConfig:
    settings = [f"weights={weights}", f"data={data.path}", "device=cpu", "max_bad_share=0.1", *more]
    return schema.load(ScoreConfig, None, settings)


def pixels_of(data: Dataset, name: str, has_bad: bool = True) -> torch.Tensor:
    """(n, 3, 8, 8) in [-1, 1], read with Pillow alone; zeros where the image is bad."""
    split = data.split(name)
    content = Path(split.shard_paths[0]).read_bytes()
    images = np.full((len(split), SIDE, SIDE, 3), 127.5)
    for row in np.setdiff1d(np.arange(len(split)), BAD[name] if has_bad else []):
        start = split.place_of(row)[0]
        images[row] = np.asarray(Image.open(io.BytesIO(content[start : start + split.place_of(row)[1]])))
    return torch.from_numpy((images / 127.5 - 1).transpose(0, 3, 1, 2)).float()


@pytest.mark.slow
def test_command_line_to_folder(weights: Path, data: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = command(f"weights={weights}", f"data={data.path}", f"out={out}", "shots=[1,4]", "neighbours=5", "batch=16")
    done = subprocess.run([sys.executable, *line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    scores = json.loads((out / "scores.json").read_text())
    names = {path.name for path in out.iterdir() if not path.name.startswith("mistake_")}
    assert names == {"confusion.png", "per_class.csv", "scores.json", *OF_REPORT, "mistakes.csv", "mistakes.json"}

    # The head, with Pillow's pixels and scikit-learn's metrics.
    model = models.load(weights).eval()
    labels = data.split("val").label_values
    readable = np.setdiff1d(np.arange(70), BAD["val"])
    with torch.no_grad():
        features = {name: model.features(pixels_of(data, name)) for name in ("train", "val")}
        logits = model.head(features["val"]).numpy()
    predicted = np.where(np.isin(np.arange(70), readable), logits.argmax(1), -1)
    assert len(np.unique(predicted)) > 3
    assert scores["top1"] == metrics.accuracy_score(labels, predicted)
    in_five = metrics.top_k_accuracy_score(labels[readable], logits[readable], k=5, labels=range(K), normalize=False)
    assert scores["top5"] == in_five / 70
    hot = torch.from_numpy(np.eye(K, dtype=np.float32)[labels])
    losses = torch.nn.functional.binary_cross_entropy_with_logits(torch.from_numpy(logits), hot, reduction="none").sum(
        1
    )
    assert scores["loss"] == pytest.approx(losses[readable].mean().item(), rel=1e-5)
    expected = metrics.precision_recall_fscore_support(labels, predicted, labels=range(K), zero_division=0)
    rows = list(csv.DictReader((out / "per_class.csv").open()))
    assert [row["class"] for row in rows] == CLASSES
    for name, column in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        np.testing.assert_allclose([float(row[name]) for row in rows], column, err_msg=name)
        assert [row[name] for row in scores["per_class"]] == pytest.approx(column)

    # Few-shot: the same images, and scikit-learn's Ridge.
    train_labels = data.split("train").label_values
    for shots, found in zip((1, 4), scores["fewshot"], strict=True):
        accuracies = []
        for seed in range(3):
            rng = np.random.default_rng(seed)
            rows = np.concatenate([rng.permutation(np.where(train_labels == c)[0])[:shots] for c in range(K)])
            rows = np.setdiff1d(rows, BAD["train"])
            x, x_test = (features[name].double().numpy() for name in ("train", "val"))
            x, x_test = ((part - x[rows].mean(0)) / (x[rows].std(0) + 1e-5) for part in (x, x_test))
            x, x_test = (np.pad(part, ((0, 0), (0, 1)), constant_values=100.0) for part in (x, x_test))
            targets = 2 * np.eye(K)[train_labels[rows]] - 1
            ridge = Ridge(alpha=1024, fit_intercept=False, solver="svd").fit(x[rows], targets)
            right = ridge.predict(x_test).argmax(1) == labels
            accuracies.append(right[readable].sum() / 70)
        assert (found["shots"], found["l2"]) == (shots, 1024)
        assert found["top1_of_seeds"] == pytest.approx(accuracies, abs=1e-9)
        assert found["top1"] == pytest.approx(np.mean(accuracies))
        assert found["std"] == pytest.approx(np.std(accuracies, ddof=1))

    # The printed and written report.
    assert [bad["key"] for bad in scores["unreadable"]] == [f"val{row}" for row in BAD["val"]]
    for page in ((out / "report.md").read_text(), done.stdout):
        assert f"{scores['top1']:.2%}" in page
    assert Image.open(out / "confusion.png").size[0] > 400


def test_intervals_of_images_in_groups_are_over_the_groups(weights: Path, make_dataset, tmp_path: Path, capsys) -> None:
    """Of 40 images of 8 patients, who are right or wrong as a whole but one, no more is known than of some 8 images."""
    data = make_dataset(
        {"train": [[0]] * 10 + [[1], [2]], "val": [[row // 5 % 3] for row in range(40)]},
        CLASSES,
        groups=lambda row: f"p{row // 5}",
    )
    split = data.split("val")
    assert split.groups.tolist() == [row // 5 for row in range(40)]
    settings = config(weights, data, f"out={tmp_path / 'out'}", "shots=2", "shots_seeds=9", "neighbours=1", "split=val")
    choice = choose_samples(settings, data.split("train"), len(CLASSES))
    for places in choice.shots.values():  # Of class 0, one of the first five rows and one of the others.
        assert np.bincount(choice.rows[places][choice.labels[places] == 0] // 5).tolist() == [1, 1]
    scores = score_report.run(settings)
    assert scores["num_groups"] == 8
    row, knn = scores["fewshot"][0], scores["knn"]
    assert all(1 <= found["effective_images"] <= 40 for found in (row, knn))
    said = capsys.readouterr().out
    linear = score_report.run(config(weights, data, f"out={tmp_path / 'folds'}", "folds=2", "split=val"))["linear"]
    of_folds = capsys.readouterr().out, linear["top1"], linear["effective_images"]
    of_each = (said, scores["top1"], scores["top1_effective_images"]), of_folds
    for text, top1, effective in of_each:
        interval = of_samples(top1, effective)
        assert f"{interval.low:.2%} to {interval.high:.2%}" in text


def test_images_without_a_label_are_counted(weights: Path, make_dataset, tmp_path: Path) -> None:
    """With several labels an image, as with one, they lowered the accuracy without a word in the report."""
    labels = [[0], [1, 2], [3]]
    data = make_dataset({"train": [[0], [1]], "val": [*labels, [], []], "labelled": labels}, CLASSES)
    scores = score_report.run(config(weights, data, f"out={tmp_path / 'out'}", "shots=0"))
    assert (scores["num_samples"], scores["num_unlabelled"]) == (5, 2)
    assert sum(row["support"] for row in scores["per_class"]) == 3
    # Of a softmax, whose loss of them would be 0, as of certain and right predictions.
    softmax, labelled = (
        score_report.run(config(weights, data, f"out={tmp_path / 'out'}", "shots=0", "loss=softmax", f"split={split}"))
        for split in ("val", "labelled")
    )
    assert softmax["loss"] == pytest.approx(labelled["loss"])


def test_several_labels_have_average_precisions(make_dataset, tmp_path: Path) -> None:
    """scikit-learn's mAP, precision, recall and F1."""
    rng = np.random.default_rng(0)
    labels = [sorted(set(rng.integers(0, K - 1, 2).tolist()))[: rng.integers(0, 3)] for _ in range(70)]
    data = make_dataset({"val": labels}, CLASSES, {"val": BAD["val"]}, groups=lambda row: f"p{row // 7}")
    weights, out = save(tmp_path / "random.pt", K, classes=CLASSES), tmp_path / "out"
    scores = score_report.run(config(weights, data, f"out={out}", "shots=0"))
    with torch.no_grad():
        shares = models.load(weights).eval()(pixels_of(data, "val")).sigmoid().numpy()
    shares[BAD["val"]] = -1
    hot = np.array([[c in of for c in range(K)] for of in labels])
    expected = metrics.average_precision_score(hot[:, : K - 1], shares[:, : K - 1], average="macro")
    assert scores["map"] == pytest.approx(expected)
    assert scores["map_low"] < scores["map"] < scores["map_high"]
    rows = list(csv.DictReader((out / "per_label.csv").open()))
    assert [row["class"] for row in rows] == CLASSES
    found = metrics.precision_recall_fscore_support(hot, shares >= 0.5, zero_division=0)
    for name, column in zip(("precision", "recall", "f1", "images"), found, strict=True):
        assert [float(row[name]) for row in rows] == pytest.approx(column), name
    assert "<h2>Lowest scores</h2>" in (out / "report.html").read_text()


def test_a_split_without_images_or_labels_has_no_scores(
    weights: Path, make_dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_dataset({"train": [[0], [1]], "bare": [[], []], "none": []}, CLASSES)
    monkeypatch.setattr(score_report, "_forward", lambda *given: pytest.fail("read images"))
    for split, has in (("bare", "images, but no labels"), ("none", "no images")):
        for more, named in ((f"split={split}", "photos"), (f"train_split={split}", "train_split .*")):
            with pytest.raises(UserError, match=f"{named}: split '{split}' has {has}, so nothing can be scored on it."):
                score_report.run(config(weights, data, "split=train", "shots=1", more, f"out={tmp_path / 'out'}"))
    assert not (tmp_path / "out").exists()


def test_weights_and_data_that_do_not_fit(weights: Path, data: Dataset, tmp_path: Path) -> None:
    def refused(said: str, path: Path = weights, *more: str) -> None:
        with pytest.raises(UserError, match=said):
            score_report.run(config(path, data, f"out={tmp_path / 'out'}", *more))
        assert not (tmp_path / "out").exists()

    refused(r"nine.pt has 9 classes, .*photos has 6 classes\. .*classify=false", save(tmp_path / "nine.pt", 9))
    refused("headless.pt has 0 classes", save_headless(tmp_path / "headless.pt"))
    other = save(tmp_path / "other.pt", K, classes=["ant", "cat|dog", "wasp", *CLASSES[3:]])
    refused(r"class 1 is 'cat\|dog' in .*other.pt, but 'bee' in .*match_classes=false", other)
    # Names of classes may be left of a head, or stand for two classes: a match by name would be one of anything.
    twice = save(tmp_path / "twice.pt", K + 1, classes=["bee", *CLASSES])
    refused(r"several classes of the weights have the name 'bee', so .*match_classes=false", twice)
    refused("extra", weights, "train_split=extra")
    for shots in (0, 5):
        broken = models.load(weights)
        torch.nn.init.constant_(broken.norm.weight, 3e38)  # finite, but its outputs are not
        models.save(broken, tmp_path / "inf.pt")
        refused("gives NaN or infinity for 64 of 70 images, the first val0", tmp_path / "inf.pt", f"shots={shots}")


def test_weights_of_a_mixture_score_a_set_by_the_names_of_its_classes(
    weights: Path, data: Dataset, tmp_path: Path
) -> None:
    """The set has six of seven classes, in another order: the scores are those of a head of these six."""
    mixed = save(tmp_path / "mixed.pt", K + 1, classes=[*reversed(CLASSES), "wasp"])
    model, alone = models.load(mixed), models.load(weights)
    state = alone.state_dict()
    for name, never in (
        ("head.weight", torch.zeros(1, state["head.weight"].shape[1])),
        ("head.bias", torch.tensor([-1e4])),
    ):
        state[name] = torch.cat([state[name].flip(0), never])
    model.load_state_dict(state)
    extra = {"preprocessing": {"image_size": SIDE, "eval_crop": "resize", "eval_resize": 0}, "loss": "sigmoid"}
    models.save(model, mixed, {**extra, "classes": [*reversed(CLASSES), "wasp"]})
    one, other = (
        score_report.run(config(path, data, "shots=2", "neighbours=3", f"out={tmp_path / path.stem}"))
        for path in (weights, mixed)
    )
    assert other["loss"] == pytest.approx(one["loss"])
    for name in ("top1", "top5", "macro_f1", "fewshot", "knn"):
        assert other[name] == one[name], name
    assert [row | {"class": row["class"]} for row in other["per_class"][:K]] == one["per_class"][::-1]
    assert other["per_class"][K]["support"] == 0


def save_headless(path: Path) -> Path:
    models.save(models.create("ViT-mu/4", SIDE, 0), path)
    return path


def test_too_many_unreadable_images_are_no_score(data: Dataset, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"max_bad_share = 0.05 .* val5"):
        score_report.run(config(weights, data, f"out={tmp_path / 'out'}", "classify=false", "max_bad_share=0.05"))
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_is_no_bad_image(data: Dataset, weights: Path, tmp_path: Path, monkeypatch) -> None:
    """A score on the rest would be that of another split, whatever the budget. Root may read files of any mode."""
    opened, denied = os.open, data.split("val").shard_paths[0]

    def open_(path: Any, flags: int, *mode: Any, **more: Any) -> int:
        if str(path) == denied:
            raise PermissionError(errno.EACCES, "Permission denied", denied)
        return opened(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", open_)
    with pytest.raises(UserError, match=r"val-000000.tar cannot be read: Permission denied"):
        score_report.run(config(weights, data, "shots=0", "max_bad_share=1", f"out={tmp_path / 'out'}"))
    assert not (tmp_path / "out").exists()


def test_wrong_labels_are_on_top_and_can_be_excluded(make_dataset, tmp_path: Path) -> None:
    """Three images with another label than what they show: found by a linear layer that did not see them, on the
    training split too; the CSV, without the lines that are right, is a list of excluded samples.
    """
    shown = [[int(c)] for c in np.random.default_rng(0).integers(0, 2, 150)]
    labels = [list(of) for of in shown]
    for row in (7, 20, 101):
        labels[row] = [1 - shown[row][0]]
    data = make_dataset({"train": labels}, CLASSES[:2], {"train": [3]}, drawn={"train": [[GREY[c]] for (c,) in shown]})
    given = config(save(tmp_path / "w.pt", K), data, "split=train", "folds=5", f"out={tmp_path / 'out'}")
    scores = score_report.run(given)
    assert 0.9 < scores["linear"]["top1"] <= 146 / 150
    rows = list(csv.DictReader((tmp_path / "out" / "mistakes.csv").open()))
    assert {row["key"] for row in rows[:3]} == {"train7", "train20", "train101"}
    for row in rows[:3]:
        number = int(row["row"])
        assert (row["split"], row["label"]) == ("train", CLASSES[labels[number][0]])
        assert row["predicted"] == CLASSES[shown[number][0]]
        pixels = np.asarray(Image.open(tmp_path / "out" / row["picture"]).convert("RGB"))
        assert pixels[-1].mean() == pytest.approx(20 + 30 * GREY[shown[number][0]], abs=8)  # Its own picture.
    html = (tmp_path / "out" / "report.html").read_text()
    assert all(row["key"] in html for row in rows)
    assert "confusion.png" in (tmp_path / "out" / "report.md").read_text()
    assert not [link for link in re.findall(r'(?:src|href)="([^"]*)', html) if not link.startswith("data:")]

    with (tmp_path / "kept.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows[:2])
    excluding = schema.load(ExcludeConfig, None, [f"data={data.path}", f"samples={tmp_path / 'kept.csv'}"])
    assert exclude.run(excluding) == 2
    assert score_report.run(given)["num_samples"] == 148
    again = {row["key"] for row in csv.DictReader((tmp_path / "out" / "mistakes.csv").open())}
    assert rows[2]["key"] in again
    assert not {row["key"] for row in rows[:2]} & again


def test_a_warning_of_trained_images_is_above_the_scores(data: Dataset, tmp_path: Path) -> None:
    on = [{"name": "photos", "fingerprint": data.fingerprint, "split": "val", "run": "zebra"}]
    trained = save(tmp_path / "w.pt", K, classes=CLASSES, trained_on=on)
    score_report.run(config(trained, data, "shots=0", f"out={tmp_path / 'out'}"))
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.index("zebra") < text.index("top-1 accuracy")
    assert "folds=5" in text.partition("## Look")[2]  # What to do to find wrong labels anyway.


def test_another_head_leaves_the_features(data: Dataset, weights: Path, tmp_path: Path) -> None:
    """classify=false needs no matching head, gives the same few-shot scores, and removes files of an earlier report."""
    out = f"out={tmp_path / 'out'}"
    whole = score_report.run(config(weights, data, out, "shots=2"))
    nine = save(tmp_path / "nine.pt", 9)  # The same features.
    only = score_report.run(config(nine, data, out, "shots=2", "classify=false"))
    assert only["fewshot"] == whole["fewshot"]
    assert "top1" not in only
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*sorted(OF_REPORT), "scores.json"]
    neither = score_report.run(config(weights, data, out, "shots=0"))
    assert (neither["top1"], neither["loss"]) == (whole["top1"], whole["loss"])
    assert "fewshot" not in neither


def test_results_have_folders_by_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the checkpoints of two runs, and of weights of one name, none replaces the other's."""
    monkeypatch.chdir(tmp_path)

    def folder(weights: str) -> str:
        made = output_folder("", weights, "evaluate", "photos-val", holds="evaluation")
        return str(made.relative_to(tmp_path) if made.is_absolute() else made)

    for place in ("runs/a/checkpoints/step-00001000", "disk/a/step-00001000"):
        Path(place).mkdir(parents=True)
    assert folder("runs/a") == "runs/a/evaluate/photos-val"
    assert folder("runs/a/checkpoints/step-00001000") == "runs/a/evaluate/step-00001000-photos-val"
    assert folder("disk/a/step-00001000") == "runs/evaluate/a-step-00001000-photos-val"
    assert folder("disk/dinov2/pytorch_model.bin") == folder("disk/dinov2") == "runs/evaluate/dinov2-photos-val"
    name = "vit_base_patch16_224.augreg_in1k"
    assert folder(f"timm/{name}") == folder(f"hf://timm/{name}") == f"runs/evaluate/{name}-photos-val"

    for weights, other in (("a/best.pt", "b/best.pt"), ("a/vit/model.safetensors", "b/vit")):
        made = Path(folder(weights))
        made.mkdir(parents=True)
        (made / "scores.json").write_text(json.dumps({"weights": weights}))
        assert folder(f"{tmp_path}/{weights}") == folder(weights)
        with pytest.raises(UserError, match=rf"^{made} .*out="):
            folder(other)


def test_preprocessing_is_that_of_the_weights_unless_asked(weights: Path, data: Dataset) -> None:
    def view(trained: dict[str, Any], size: int, *more: str) -> tuple[str, int]:
        found = evaluation_view(config(weights, data, *more), size, trained)
        return found.eval_crop, found.eval_resize

    trained = {"image_size": 224, "eval_crop": "center", "eval_resize": 248}
    assert view({}, 224) == ("center", 0)
    assert view(trained, 224) == ("center", 248)
    assert view(trained, 448) == ("center", 496)
    assert view(trained, 448, "eval_resize=480", "eval_crop=resize_center") == ("resize_center", 480)
    with pytest.raises(UserError, match="eval_crop = zoom"):
        view({"eval_crop": "zoom"}, 224)


def test_scores_are_sent_to_mlflow_beside_the_run_of_the_weights(
    data: Dataset, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    run = tmp_path / "runs" / "small"
    run.parent.mkdir()
    shutil.copy(database, run.parent / "mlflow.db")
    Tracker(TrackConfig(), run.parent, run, RunFacts("small", "pretrain", description="What it is.")).finish("FINISHED")
    weights = save(run / "weights.pt", K, classes=CLASSES)
    uri = default_uri(run.parent)
    scores = score_report.run(
        config(weights, data, "split=val", "shots=1", f"out={tmp_path / 'report'}", f"mlflow={uri}")
    )
    client = connect(uri)
    sent, trained = client.search_runs(["1"], order_by=["attributes.start_time DESC"])
    assert (sent.info.run_name, sent.data.tags["kind"]) == (f"try on {data.path.name}:val", "evaluation")
    assert sent.data.metrics["eval/val_top1"] == scores["top1"]
    interval = of_samples(scores["top1"], scores["num_samples"])
    result = sent.data.tags["mlflow.note.content"].split("\n\n")[0]
    assert f"{scores['top1']:.2%}" in result
    assert f"{interval.low:.2%} to {interval.high:.2%}" in result
    assert sent.data.metrics[f"probe/{data.path.name}_1shot"] == scores["fewshot"][0]["top1"]
    assert (sent.data.params["train_split"], sent.data.params["l2"]) == ("train", "[1024.0]")
    assert sent.data.tags["parent_run_id"] == trained.info.run_id
    (given,) = sent.inputs.dataset_inputs
    assert (given.dataset.digest, given.tags[0].value) == (data.fingerprint, "evaluation")
    assert "confusion.png" in [file.path for file in client.list_artifacts(sent.info.run_id)]
