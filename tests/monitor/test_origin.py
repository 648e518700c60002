"""The weights that something begins with are recorded as they are at that moment."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.monitor.origin import find_origin
from pipeline.monitor.page_folder import PageFolder, Start
from pipeline.monitor.run_page import DatasetFacts, RunFacts, WeightsOrigin
from pipeline.process.committed import Checksum

FLOWERS = DatasetFacts("flowers", "/data/flowers", "0123456789abcdef", "val", 900, 102, "evaluation")
TINY = models.ViTConfig(16, 1, 16, 2, 4, (8, 8), 3)


def run_in_progress(folder: Path, evaluations: dict[int, float]) -> Path:
    facts = RunFacts("large", "pretrain", datasets=(FLOWERS,), steps=1000, score="val_top1")
    PageFolder(folder).begin("vit", facts, Start(0.0, 0, []))
    lines = [json.dumps({"step": step, "time": 1, "metrics": {"val_top1": top1}}) for step, top1 in evaluations.items()]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def checkpoint(run: Path, step: int, sha256: str = "c0ffee") -> Path:
    file = run / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    (file.parent / "checksums.json").write_text(json.dumps({file.name: asdict(Checksum(7, sha256))}))
    return file


def test_a_run_that_trains_on_has_given_what_it_had_then(tmp_path: Path) -> None:
    run = run_in_progress(tmp_path / "large", {200: 0.0455, 400: 0.0642})
    file = checkpoint(run, 200)
    origin = find_origin(file, "weights")
    assert origin == WeightsOrigin(str(file), "c0ffee", "large", "", 200, "4.55 % top-1 flowers:val")
    assert origin.title == "large, step 200"
    assert origin.details == "step 200, SHA-256 c0ffee..., which scored 4.55 % top-1 flowers:val"
    assert find_origin(checkpoint(run, 300), "weights").score == "4.55 % top-1 flowers:val at step 200"
    assert find_origin(checkpoint(run, 100), "weights").score == ""


def test_a_checkpoint_that_a_run_in_training_has_removed_is_gone(tmp_path: Path) -> None:
    (file := checkpoint(tmp_path / "large", 200)).unlink()
    (file.parent / "checksums.json").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: it is gone\. A run in training removes its older"):
        find_origin(file, "weights")


def test_the_run_of_a_checkpoint_in_another_folder_is_the_one_named(tmp_path: Path) -> None:
    run = run_in_progress(tmp_path / "large", {200: 0.0455})
    file = checkpoint(tmp_path / "disk", 200)
    assert find_origin(file, "weights").score == ""
    assert find_origin(file, str(run)).score == "4.55 % top-1 flowers:val"


def test_a_file_that_says_which_run_made_it(tmp_path: Path) -> None:
    file = tmp_path / "export.safetensors"
    models.save(models.build(TINY, seed=0), file, {"run": "large", "step": 90, "classes": ["a", "b", "c"]})
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert find_origin(file, "weights") == WeightsOrigin(str(file), sha256, "large", "", 90, "")


@pytest.mark.parametrize("content", [b"\xff" * 100, b"\x15\0\0\0\0\0\0\0" + b'{"__metadata__": [5]} '])
def test_files_of_others_and_damaged_ones_have_a_hash(tmp_path: Path, content: bytes) -> None:
    (file := tmp_path / "B_16.safetensors").write_bytes(content)
    origin = find_origin(file, "weights")
    assert origin == WeightsOrigin(str(file), hashlib.sha256(content).hexdigest())
    assert origin.title == "B_16.safetensors"


def test_tags_say_all_of_it() -> None:
    origin = WeightsOrigin("/r/w", "c0ffee", "large", "f00", 200, "4.55 % top-1 flowers:val")
    tags = RunFacts("small", "finetune", parents={"parent": "f00"}, origin=origin).all_tags()
    assert {name: text for name, text in tags.items() if name.startswith("parent")} == {
        "parent": "large, step 200",
        "parent_checkpoint": "/r/w",
        "parent_sha256": "c0ffee",
        "parent_score": "4.55 % top-1 flowers:val",
        "parent_run_id": "f00",
    }
