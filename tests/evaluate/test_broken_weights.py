"""Each command that reads weights reports broken ones in one line, exits with 2, and writes nothing."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import ROOT

from pipeline.evaluate.export import run
from pipeline.evaluate.loaded_model import load_model
from pipeline.model import create, save
from pipeline.model.weights import METADATA
from pipeline.settings.commands.weights import ExportConfig, FeaturesConfig
from tests.evaluate.conftest import MakeDataset

COMMANDS = {
    "predict": ["data=IMAGES"],
    "explain": ["out=OUT"],
    "features": ["data=IMAGES", "out=TABLE"],
    "evaluate": ["data=IMAGES", "out=OUT", "shots=0"],
    "export": ["format=huggingface", "out=OUT"],
}


def hold(out: Path, is_file: bool) -> subprocess.Popen[str]:
    """A process that writes an output."""
    script = (
        "import sys; from pathlib import Path; from pipeline.base.locks import only_writer\nwith"
        " only_writer(Path(sys.argv[1]), sys.argv[2] == 'True'): print(); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(out), str(is_file)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "\n"
    return process


def broken(kind: str, folder: Path) -> tuple[Path, str]:
    """(weights, expected message)"""
    model = create("ViT-mu/4", 8, 3)
    path = folder / "model.safetensors"
    if kind == "class names":
        save(model, path, {"classes": ["one"]})
        return path, "class names do not fit its head"
    if kind == "metadata":
        save(model, path)
        content = path.read_bytes()
        path.write_bytes(content.replace(b'\\"depth\\": 1', b'\\"depth\\": x', 1))
        return path, f"its metadata {METADATA}"
    torch.save(torch.nn.Linear(2, 2), folder / "model.pth")
    return folder / "model.pth", ".safetensors"


def arguments(command: str, weights: Path, folder: Path) -> list[str]:
    places = {"IMAGES": str(folder / "photos"), "OUT": str(folder / "out"), "TABLE": str(folder / "out.parquet")}
    given = [argument.partition("=") for argument in COMMANDS[command]]
    return [f"weights={weights}", *(f"{name}={places.get(value, value)}" for name, _, value in given)]


@pytest.mark.parametrize("kind", ["class names", "metadata", "a pickle"])
@pytest.mark.parametrize("command", COMMANDS)
def test_broken_weights_are_one_line(
    command: str,
    kind: str,
    tmp_path: Path,
    make_dataset: MakeDataset,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_dataset({"val": [[0], [1], [2]]}, ["a", "b", "c"])
    weights, message = broken(kind, tmp_path)
    script = ROOT / "launch" / f"{command}.py"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments(command, weights, tmp_path)])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert len(said) == 1, said
    assert message in said[0]
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("script", "given", "is_file"),
    [
        ("predict", ["data=IMAGES", "out=TABLE"], True),
        ("features", ["data=IMAGES", "out=TABLE"], True),
        ("evaluate", COMMANDS["evaluate"], False),
        ("explain", COMMANDS["explain"], False),
    ],
)
def test_a_second_command_that_writes_the_same_is_refused(
    script: str,
    given: list[str],
    is_file: bool,
    tmp_path: Path,
    make_dataset: MakeDataset,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_dataset({"val": [[0], [1], [2]]}, ["a", "b", "c"])
    save(create("ViT-mu/4", 8, 3), tmp_path / "model.pt")
    out = tmp_path / ("out.parquet" if is_file else "out")
    COMMANDS[script] = given
    monkeypatch.setattr(sys, "argv", [script, *arguments(script, tmp_path / "model.pt", tmp_path)])
    first = hold(out, is_file)
    try:
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / "launch" / f"{script}.py"), run_name="__main__")
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2
        assert f"process {first.pid}," in line
        assert f"{out} is being written" in line
    finally:
        first.kill()
        first.wait()
    if script == "features":  # What a killed command locked holds nobody up.
        runpy.run_path(str(ROOT / "launch" / f"{script}.py"), run_name="__main__")
        assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "photos", "out.parquet"}


@pytest.mark.parametrize(
    "preprocessing",
    [
        {"eval_resize": None, "image_size": 8},
        {"eval_resize": 9, "image_size": None},
        {"eval_crop": None, "resize_filter": None},
        None,
    ],
)
def test_preprocessing_that_the_weights_do_not_know_is_the_default(tmp_path: Path, preprocessing: dict | None) -> None:
    """Null in the file of another writer: it ended in a TypeError, or a refusal of `eval_crop = None`."""
    save(create("ViT-mu/4", 8, 3), tmp_path / "a.safetensors", {"preprocessing": preprocessing, "loss": None})
    loaded = load_model(FeaturesConfig(weights=str(tmp_path / "a.safetensors"), source=["a"], out="a"))
    expected = 9 if (preprocessing or {}).get("eval_resize") else 0
    assert (loaded.view.eval_crop, loaded.view.eval_resize, loaded.view.resize_filter) == ("center", expected, "linear")
    assert loaded.loss_kind == "softmax"
    run(ExportConfig(weights=str(tmp_path / "a.safetensors"), format="timm", out=str(tmp_path / "timm")))
