"""The path that is proposed for one that does not exist."""

from pathlib import Path

import pytest

from pipeline.base.missing import missing, similar_path


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("datasets/phtos", "datasets/photos"),
        ("datasets/Photos", "datasets/photos"),
        ("dataset/photos", "datasets/photos"),
        ("dataset/phtos", None),  # Two mistakes.
        ("runs/own_images_finetund", "runs/own_images_finetuned"),
        ("own_images_finetuned", "runs/own_images_finetuned"),
        ("own_images_finetund", "runs/own_images_finetuned"),
        ("runs/own_images_finetund/config.yaml", "runs/own_images_finetuned/config.yaml"),
        ("ViT-S_16.npy", "ViT-S_16.npz"),
        ("ViT-S_16.npz/x", None),
        ("nothing", None),
        (".hiden", None),
        ("s3://bucket/datasets/phtos", None),
    ],
)
def test_a_similar_path_is_found(
    given: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("datasets/photos/train", "runs/own_images_finetuned", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/own_images_finetuned/config.yaml", "ViT-S_16.npz"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert similar_path(given) == (meant and Path(meant))
    if "://" not in given:
        assert similar_path(tmp_path / given) == (meant and tmp_path / meant)
    assert missing(given).endswith(f"mean {meant}?" if meant else ".")


def test_a_list_and_a_pattern_are_told_from_a_path(tmp_path: Path) -> None:
    assert "[a.jpg,b.jpg]" in missing("a.jpg,b.jpg")
    assert "*" in missing("photos/*.jpg", way_out="x").partition(":")[2]
    (tmp_path / "photos").mkdir()
    assert missing(f"{tmp_path}/photos,").endswith(f"mean {tmp_path}/photos?")
