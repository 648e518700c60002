"""Weights to distill, where a shipped file names some that others published."""

from pathlib import Path

from pipeline.model import build, configure, save


def teacher_for(file: Path, folder: Path) -> list[str]:
    """The setting that names a tiny teacher, made in `folder`, if the file distills one."""
    if "loss: distill" not in file.read_text():
        return []
    save(build(configure("ViT-mu/14", 224, 0)), folder / "teacher.pt")
    return [f"objective.teacher={folder / 'teacher.pt'}"]
