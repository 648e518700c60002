"""Weights to distill, where a shipped file names some that others published."""

from pathlib import Path

from pipeline.model import build, configure, save


def teacher_for(file: Path, folder: Path, num_classes: int = 2) -> list[str]:
    """The setting that names a tiny teacher of so many classes, made in `folder`, if the file distills one."""
    if "loss: distill" not in file.read_text():
        return []
    save(build(configure("ViT-mu/14", 224, num_classes)), folder / "teacher.pt")
    return [f"objective.teacher={folder / 'teacher.pt'}"]
