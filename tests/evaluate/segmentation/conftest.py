"""Pairs of blocks of colours, and weights with random features."""

from pathlib import Path

import pytest
from block_pairs import SIDE, Write, write_block_pairs

from pipeline import model as models


@pytest.fixture
def write_pairs(tmp_path: Path) -> Write:
    def write(number: int, name: str = "train", size: tuple[int, int] = (24, 32)) -> tuple[Path, Path]:
        return write_block_pairs(tmp_path / name, number, size)

    return write


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A tiny ViT with the weights of its initialisation, which reads images of 16 px in patches of 4."""
    models.save(
        models.create("ViT-mu/4", 2 * SIDE, 0, depth=2),
        tmp_path / "random.pt",
        {"preprocessing": {"image_size": 2 * SIDE}},
    )
    return tmp_path / "random.pt"
