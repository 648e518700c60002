"""Comparison of runs: differences are of resolved settings, and damaged files are reported in one line."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from review_runs import write_run

from pipeline import model as models
from pipeline.checkpoint.store import FORMAT
from pipeline.errors import UserError
from pipeline.evaluate import architecture
from pipeline.review import compare
from pipeline.review.reader import from_folder
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

WIDE = models.configure("ViT-Ti/16", 32, 4, width=32, depth=2, mlp_width=64, num_heads=2)


def older_run(
    folder: Path, config: models.Config, *settings: str, steps: int = 20, in_checkpoint: bool = False
) -> Path:
    """A run folder of an earlier version, without weights and without page/."""
    overrides = ["data.path=x", "train.length=9 steps", "train.global_batch=16", f"name={folder.name}", *settings]
    folder.mkdir(parents=True)
    run = schema.to_dict(schema.load(RunConfig, None, overrides))
    (folder / "config.json").write_text(json.dumps(run))
    lines = [{"step": s, "time": s, "metrics": {"loss": 1 / s, "images_per_second": s}} for s in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if in_checkpoint:
        checkpoint = folder / "checkpoints" / "step-00000009"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"format": FORMAT, "step": 9, "model": config.to_dict()}))
    else:
        (folder / architecture.FILE).write_text(json.dumps(config.to_dict()))
    return folder


def differences(*folders: Path) -> list[tuple[str, ...]]:
    return compare.differences(compare.settings_of(compare.named([from_folder(folder) for folder in folders])))


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_a_model_that_came_with_weights_is_no_difference(tmp_path: Path, in_checkpoint: bool) -> None:
    named = ["model.name=ViT-Ti/16", "model.width=32", "model.depth=2", "model.mlp_width=64", "model.num_heads=2",
             "model.image_size=32"]  # fmt: skip
    a = older_run(tmp_path / "a", WIDE, *named, in_checkpoint=in_checkpoint)
    b = older_run(tmp_path / "b", WIDE, "init.weights=a", "model.image_size=32", "seed=3", in_checkpoint=in_checkpoint)
    assert differences(a, b) == [("seed", "0", "3"), ("init.weights", "None", "a")]


def test_models_that_differ_are_named_and_their_fields_listed(tmp_path: Path) -> None:
    a = older_run(tmp_path / "a", models.configure("ViT-B/16", 32, 4), "init.weights=x")
    b = older_run(tmp_path / "b", models.configure("BiT-R50x1", 32, 4), "init.weights=x")
    found = {key: values for key, *values in differences(a, b)}
    assert found["model.name"] == ["ViT-B/16", "BiT-R50x1"]
    assert found["model.depth"] == ["12", "-"]
    assert found["model.units"] == ["-", "[3, 4, 6, 3]"]
    assert "model.image_size" not in found


@pytest.mark.parametrize(
    "name", ["ViT-L/16", "ViT-H/14", "R50+ViT-B/16", "R+Ti/16", "BiT-R101x3", "Axial-ViT-B/32", "ViT-mu/8"]
)
def test_a_name_is_found_again(name: str) -> None:
    assert architecture.name_of(models.configure(name, 224, 10, covered=False)) == name


def test_a_size_without_a_name_is_described() -> None:
    assert architecture.name_of(WIDE) == "ViT/16, width 32, depth 2"


def test_the_median_speed_needs_five_log_lines(tmp_path: Path) -> None:
    said = {steps: compare.speed(from_folder(older_run(tmp_path / f"{steps}", WIDE, "init.weights=x", steps=steps)))
            for steps in (0, 3, 5, 20)}  # fmt: skip
    assert said == {0: "not logged", 3: "3 log lines, too few", 5: "3.0", 20: "10.5"}


def test_damaged_lines_are_counted_and_repeats_count_as_the_last(tmp_path: Path) -> None:
    folder = older_run(tmp_path / "a", WIDE, "init.weights=x", steps=5)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "time": 1, "metrics": {"loss": "nan"}}\n7\n{"step": "x", "metrics": {}}\n{"st')
    record = from_folder(folder)
    losses = record.metrics["loss"]
    assert (list(losses.steps), list(losses.values[:4])) == ([1, 2, 3, 4, 5], [1, 1 / 2, 1 / 3, 1 / 4])
    assert losses.values[4] != losses.values[4]
    assert record.num_damaged == 3


def test_mutated_files_are_read_or_refused_in_one_line(
    tmp_path: Path, mutate: Callable[[bytes, random.Random], bytes]
) -> None:
    folder, rng = write_run(tmp_path / "a", evaluations={20: 0.5}), random.Random(0)
    names = ("config.json", "metrics.jsonl", architecture.FILE, "page/facts.json")
    originals = {name: (folder / name).read_bytes() for name in names}
    refused: list[tuple[str, str]] = []
    for number in range(300):
        name = names[number % len(names)]
        (folder / name).write_bytes(mutate(originals[name], rng))
        try:
            records = compare.named([from_folder(folder)] * 2)
            list(compare.page(records, compare.groups_of(records), []))
        except UserError as error:
            refused.append((name, str(error)))
        (folder / name).write_bytes(originals[name])
    assert len(refused) > 100
    assert [said for name, said in refused if "\n" in said or str(folder / name) not in said] == []
