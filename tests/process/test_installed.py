"""The wheel, in a fresh environment and an empty folder: shards images, trains on them, and loads the weights as a
library.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import raw_images

from data_tools.sources.labels import read_names
from pipeline.process import installed
from pipeline.settings.yaml_reader import read_yaml

ROOT = Path(__file__).resolve().parents[2]
_PREDICT = """
import sys, torch
import pipeline
from pipeline.model import load
assert pipeline.__file__.startswith(sys.prefix), pipeline.__file__
model = load("runs/try").eval()
print(model(torch.zeros(2, 3, 16, 16)).softmax(-1).sum().item())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as the Dockerfile does: from the paths that it copies, in a folder that has nothing else."""
    source = tmp_path_factory.mktemp("source")
    for path in copied():
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, source / path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", source, source], check=True, timeout=200)
    (file,) = source.glob("*.whl")
    return file


def copied() -> list[str]:
    """The paths that the Dockerfile copies from the repository."""
    lines = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return [path.rstrip("/") for line in lines for path in line.split()]


def test_the_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().split("\n") if line.startswith("!")]
    assert sorted(copied()) == sorted(kept)
    assert [path for path in kept if not (ROOT / path).exists()] == []


def test_the_dockerfile_installs_exactly_the_pinned_packages(tmp_path: Path) -> None:
    """Runs the image's own line that reads pyproject.toml."""
    (line,) = re.findall(r'&& python (-c ".*") > requirements.txt', (ROOT / "Dockerfile").read_text())
    made = subprocess.run(
        ["bash", "-c", f"{sys.executable} {line}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert made.stdout.splitlines() == project["dependencies"] + project["optional-dependencies"]["fast"]


def test_the_wheel_has_every_file_of_its_folders(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    folders = ("pipeline", "data_tools", "launch", "configs")
    here = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == here


def test_shipped_configs_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_yaml(Path("configs/demo/pretrain.yaml"))["name"] == "pretrain"
    assert "truck" in read_names("configs/transfer/cifar10_last5.txt", "class_list")
    own = tmp_path / "configs/demo/pretrain.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("name: own")
    assert read_yaml(Path("configs/demo/pretrain.yaml")) == {"name": "own"}
    assert installed.shipped(Path("configs/../pyproject.toml")) == Path("configs/../pyproject.toml")


def test_a_command_is_a_script_if_it_exists_else_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert installed.python_arguments("pretrain") == ["-m", "launch.pretrain"]
    assert installed.python_arguments("launch/pretrain.py") == ["-m", "launch.pretrain"]
    assert installed.python_arguments("own.py") == ["own.py"]
    monkeypatch.chdir(ROOT)
    assert installed.python_arguments("launch/pretrain.py") == ["launch/pretrain.py"]


def test_vit_lists_the_commands_and_refuses_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vit"])
    installed.main()
    listed = capsys.readouterr().out
    for file in (ROOT / "launch").glob("[!_]*.py"):
        about = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n")[0].partition(": ")[2]
        assert fnmatch(listed, f"*  {file.stem} *{about.replace('[', '[[]')}*")
    monkeypatch.setattr(sys, "argv", ["vit", "pretrian"])
    with pytest.raises(SystemExit, match="2"):
        installed.main()
    assert capsys.readouterr().err == "error: vit 'pretrian': no such command. `vit --help` lists them.\n"


@pytest.mark.ray
@pytest.mark.slow
def test_the_installed_library_shards_trains_and_loads(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    # The packages of this environment, without what its own .pth files add: the repository.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-index", "--ignore-installed", wheel], check=True, timeout=200)

    work = tmp_path / "work"
    photos = raw_images.write_folder(
        {f"{kind}/{n}.jpg": raw_images.jpeg(n) for kind in ("cat", "dog") for n in range(12)}, work / "photos"
    )
    path = f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PATH": path}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("vit", "shard", f"source={photos}", "out=data", "val_share=0.25", "num_tasks=1")
    tiny = ["model.width=32", "model.depth=1", "model.mlp_width=32", "model.num_heads=2", "model.image_size=16"]
    short = ["train.length=2 steps", "train.global_batch=4", "train.micro_batch=4", "data.threads=1", "data.streams=4"]
    run(
        home / "bin/python",
        "-m",
        "launch.pretrain",
        "--config",
        "configs/demo/pretrain.yaml",
        "name=try",
        "data.path=data",
        "track.enabled=false",
        "track.figures=false",
        "evaluate.every=2 steps",
        "checkpoint.every=2 steps",
        *tiny,
        *short,
    )
    assert float(run(home / "bin/python", "-c", _PREDICT)) == pytest.approx(2)
    assert sorted(path.name for path in work.iterdir()) == ["data", "photos", "runs"]
