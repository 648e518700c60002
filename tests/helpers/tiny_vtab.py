"""Tiny weights and three of VTAB's tasks, for the tests of sweeps."""

from pathlib import Path

from tiny import make_dataset

from pipeline import model as models

PREPARED = ("dtd", "pets", "svhn")
_SPLITS = {"train800": 16, "val200": 5, "train800val200": 21, "test": 12}
_SETTINGS = [
    "protocol.name=tiny", "protocol.image_size=8", "protocol.batch=16", "protocol.length=[2 steps]",
    "protocol.schedule.decay=cosine", "protocol.schedule.warmup=0 steps", "protocol.augment.crop=resize_crop",
    "protocol.augment.eval_crop=resize", "threads=1",
]  # fmt: skip


def prepare(folder: Path) -> list[str]:
    """Writes both into the folder. Returns the settings of a sweep but its learning rates."""
    models.save(models.create("ViT-mu/4", 8, 7), folder / "weights.pt", {"fingerprint": "f" * 16})
    for seed, name in enumerate(PREPARED):
        make_dataset(folder / "tasks" / name, _SPLITS, seed=seed)
    return [f"weights={folder / 'weights.pt'}", f"data={folder / 'tasks'}", *_SETTINGS]
