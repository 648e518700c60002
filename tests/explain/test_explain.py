"""launch/explain.py, from settings to the folder and the MLflow run; the choice of images, maps and mistakes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from given_images import images as images_given
from PIL import Image
from raw_images import encoded

from pipeline import model as models
from pipeline.architecture.pixels import Pixels
from pipeline.base import gallery as base_gallery
from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.explain import explain, galleries
from pipeline.explain.attention import POOLING, Attention
from pipeline.settings import schema
from pipeline.settings.commands.weights import ExplainConfig

SIDE = 16
CLASSES = ["ant", "$bee_x", "a class of a very long name"]
ALL = [
    "attention",
    "components",
    "distance",
    "filters",
    "positions",
    "predictions",
    "rollout",
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine images in folders of their classes, a file that is not an image, and an image without a class."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(11):
        place = folder / (CLASSES[number % 3] if number < 10 else "unsorted")
        place.mkdir(exist_ok=True)
        image = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((20, 24))
        (place / f"{number}.png").write_bytes(b"junk" if number == 9 else encoded(image, "PNG"))
    return folder


def save(path: Path, name: str = "ViT-mu/4", num_classes: int = 3, **changes: object) -> Path:
    model = models.create(name, SIDE, num_classes, **changes)
    if num_classes:
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    models.save(model, path, {"classes": CLASSES[:num_classes], "loss": "softmax", "run": "try", "step": 7})
    return path


def run(weights: Path, out: Path, *more: str) -> dict:
    settings = [f"weights={weights}", f"out={out}", "device=cpu", *more]
    return explain.run(schema.load(ExplainConfig, None, settings))


@pytest.fixture
def not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but no pixels of them: test_command_to_folder_and_mlflow has all of these."""
    monkeypatch.setattr(explain, "png", lambda figure, dpi, caption: b"")


def drawn(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.png"))


@pytest.mark.slow
def test_command_to_folder_and_mlflow(
    photos: Path, database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calls the command's function in this process: starting another one, with MLflow, would take half of the time."""
    from mlflow.tracking import MlflowClient

    weights, out, uri = save(tmp_path / "random.pt", depth=2), tmp_path / "out", f"sqlite:///{tmp_path / 'mlflow.db'}"
    shutil.copy(database, tmp_path / "mlflow.db")
    client = MlflowClient(uri)
    client.create_experiment("explain", artifact_location=(tmp_path / "artifacts").as_uri())
    settings = [f"weights={weights}", images_given(photos), f"out={out}", "device=cpu", "num_drawn=3", f"mlflow={uri}"]
    explain.run(schema.load(ExplainConfig, None, settings))

    assert "9.png" in capsys.readouterr().out
    assert drawn(out) == ALL
    for name in ALL:
        pixels = np.asarray(Image.open(out / f"{name}.png").convert("RGB"))
        assert min(pixels.shape[:2]) >= 300, name
        assert pixels.std() > 10, name
    numbers = json.loads((out / "explain.json").read_text())
    assert (numbers["run"], numbers["step"], len(numbers["images"])) == ("try", 7, 3)
    assert np.shape(numbers["mean_attention_distance"]) == (2, 2)
    assert numbers["predictions"]["images"] == 9

    (found,) = client.search_runs([client.get_experiment_by_name("vit").experiment_id])
    names = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert names == {f"{name}.png" for name in ALL} | {"explain.json", "metrics.jsonl", "run.json"}
    assert found.data.tags["weights_run"] == "try"


@pytest.mark.usefixtures("not_drawn")
def test_classes_of_one_name_are_not_taken_for_each_other(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ImageNet has two classes called crane."""
    model = models.create("ViT-mu/4", SIDE, 3)
    torch.nn.init.zeros_(model.head.weight)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([0.0, 9.0, 0.0]))
    named = {"classes": CLASSES, "class_names": ["crane", "crane", "fly"], "loss": "softmax"}
    models.save(model, tmp_path / "cranes.pt", named)
    tiles = list[galleries.Tile]()
    monkeypatch.setattr(base_gallery, "gallery", lambda rows, *about, **more: [tiles.extend(row) for row in rows])
    found = run(tmp_path / "cranes.pt", tmp_path / "out", "draw=predictions", images_given(photos))["predictions"]
    assert (found["images"], found["wrong"]) == (9, 6)
    signs = sorted((tile.lines[0], tile.lines[1].partition(":")[0]) for tile in tiles)
    assert {tile.pixels.shape for tile in tiles} == {(16, 16, 3)}  # As the model reads them.
    assert signs == [("crane", "✓ crane")] * 3 + [("crane", "✗ crane")] * 3 + [("fly", "✗ crane")] * 3


@pytest.mark.usefixtures("not_drawn")
def test_drawings_that_do_not_apply_are_left_out(photos: Path, tmp_path: Path) -> None:
    images = images_given(photos)
    bit = tmp_path / "bit.pt"
    models.save(models.build(models.ResNetConfig((1,), 32, (SIDE, SIDE), 3)), bit)
    run(bit, tmp_path / "bit", images, "num_drawn=2")
    assert drawn(tmp_path / "bit") == ["filters", "predictions"]
    headless = save(tmp_path / "headless.pt", num_classes=0, positions="relative", pool="gap")
    run(headless, tmp_path / "headless", images)
    assert drawn(tmp_path / "headless") == [
        "attention",
        "components",
        "distance",
        "filters",
        "rollout",
    ]
    whole = save(tmp_path / "whole.pt")
    run(whole, tmp_path / "whole")
    assert drawn(tmp_path / "whole") == ["filters", "positions"]

    for weights, words, *more in (
        (bit, "rollout", images, "draw=[filters,rollout]"),
        (whole, "source=", "draw=attention"),
        (whole, "layer = 2", "layer=2"),
    ):
        with pytest.raises(UserError, match=words):
            run(weights, tmp_path / "none", *more)
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("not_drawn")
def test_weights_that_change_meanwhile_are_those_that_are_drawn(tmp_path: Path, monkeypatch) -> None:
    """A run in training commits a checkpoint while its figures are drawn: MLflow is told which weights these are of."""
    weights, sent = save(tmp_path / "pytorch_model.bin"), []
    draw = explain.principal_filters

    def draw_slowly(*arguments: Any) -> Any:
        save(tmp_path / "new.pt").rename(tmp_path / "model.safetensors")  # comes first
        return draw(*arguments)

    monkeypatch.setattr(explain, "principal_filters", draw_slowly)
    monkeypatch.setattr(explain, "send_report", lambda uri, folder, facts, *more: sent.append(facts))
    run(tmp_path, tmp_path / "out", "draw=filters", "mlflow=sqlite:///x.db")
    assert sent[0].origin.path == str(weights)


def test_figures_name_the_channels_that_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "png", lambda figure, dpi, caption: caption.encode())
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.full((20, 24, 4), 1000 * number, np.uint16))
    weights = save(tmp_path / "bands.pt", pixels=Pixels.full_range(("blue", "green", "red", "nir"), "uint16"))
    found = run(weights, tmp_path / "out", images_given(tmp_path), "draw=[attention,predictions,positions]")
    assert found["shown_channels"] == ["red", "green", "blue"]
    named = {path.stem: "red, green" in path.read_text() for path in (tmp_path / "out").glob("*.png")}
    assert named == {"attention": True, "predictions": True, "positions": False}


@pytest.mark.usefixtures("not_drawn")
def test_a_choice_of_drawings_layers_and_heads(photos: Path, tmp_path: Path, capsys) -> None:
    weights, out = save(tmp_path / "random.pt", depth=2), tmp_path / "out"
    run(weights, out, images_given(photos), "draw=attention", "layer=all", "head=all", "num_drawn=2")
    assert drawn(out) == ["attention"]
    few = run(weights, out, images_given(photos), "draw=[attention,components]", "layer=2", "head=1", "num_drawn=4")
    assert drawn(out) == ["attention", "components"]
    # A smaller choice is part of a larger one; given files keep their order. No figure of an earlier command stays.
    more = run(weights, out, images_given(photos), "draw=components", "num_drawn=6")
    assert drawn(out) == ["components"]
    assert more["images"][:4] == few["images"]
    order = random_numbers.permutation(11, 0, Purpose.EXPLAINED_IMAGES)  # As everywhere: the seed, then the purpose.
    names = sorted(f"{path.parent.name}/{path.name}" for path in photos.glob("*/*.png"))
    readable = [names[row] for row in order[:6] if names[row] != "ant/9.png"]
    assert ["/".join(Path(key).parts[-2:]) for key in more["images"]] == readable
    files = [str(photos / "unsorted" / "10.png"), str(photos / "ant" / "0.png")]
    assert run(weights, out, f"source=[{','.join(files)}]", "draw=components")["images"] == files
    Image.open(files[0]).convert("RGBA").save(tmp_path / "see_through.png")
    capsys.readouterr()
    for drawing in ("components", "predictions"):
        run(weights, out, f"source=[{files[1]},{tmp_path / 'see_through.png'}]", f"draw={drawing}")
    assert capsys.readouterr().out.count("1 image with an alpha") == 2


def test_maps_of_layers_and_heads() -> None:
    maps = torch.rand(2, 4, 3, 5, 5)  # three blocks and the pooling
    layers = ["block 1", "block 2", "block 3", POOLING]
    attention = Attention(maps, layers, maps[:, 0, 0], maps[:, :3, :, 0, 0])
    for layer, head, expected, names in (
        ("all", "mean", maps.mean(2, keepdim=True), (layers, ["mean of the heads"])),
        ("2", "all", maps[:, 1:2], (["block 2"], ["head 1", "head 2", "head 3"])),
        ("3", "2", maps[:, 2:3, 1:2], (["block 3"], ["head 2"])),
    ):
        chosen, *found = galleries.choose_maps(attention, layer, head)
        assert torch.allclose(chosen, expected)
        assert tuple(found) == names
