"""Reads the copies of VTAB-1k that are common among users of PyTorch: images, and lists of `images/train800/000000.jpg
12`.

They were exported from tensorflow_datasets (NOAH/get_vtab1k.py and its derivatives); the images were encoded again and
named by number. Without the original keys, the splits cannot be proved.
"""

from data_tools.sources.listing import Collector, Listing
from data_tools.vtab.split import NUM_TRAIN, NUM_VAL, SPLITS
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.atomic import read_bytes
from pipeline.data.storage.bucket import AnyPath, name_inside, walk_files
from pipeline.experiment.vtab_tasks import Task
from pipeline.settings.quantities import whole_number

# Names of a task's folder in NOAH and other projects.
_FOLDERS = {
    "cifar100": ["cifar", "cifar_100", "cifar100"],
    "flowers102": ["oxford_flowers102", "flowers102"],
    "pets": ["oxford_iiit_pet", "pets"],
    "retinopathy": ["diabetic_retinopathy", "retinopathy"],
    "clevr_count": ["clevr_count"],
    "clevr_distance": ["clevr_dist", "clevr_distance"],
    "kitti_distance": ["kitti", "kitti_distance"],
    "dsprites_location": ["dsprites_loc", "dsprites_location"],
    "dsprites_orientation": ["dsprites_ori", "dsprites_orientation"],
    "smallnorb_azimuth": ["smallnorb_azi", "smallnorb_azimuth"],
    "smallnorb_elevation": ["smallnorb_ele", "smallnorb_elevation"],
}
_UNION = "train800val200"


def find(task: Task, lists: AnyPath) -> AnyPath | None:
    """Returns the folder of a task, or None."""
    return next((mark.parent for mark in marks(task, lists) if mark.is_file()), None)


def marks(task: Task, lists: AnyPath) -> list[AnyPath]:
    """Returns the files of which one must exist."""
    return [lists / name / "test.txt" for name in _FOLDERS.get(task.name, [task.name])]


def listing(task: Task, folder: AnyPath, check: bool) -> Listing:
    """List all samples. check: raise UserError for other numbers of images than those of VTAB."""
    rows = {split: _read(folder / f"{split}.txt") for split in SPLITS if (folder / f"{split}.txt").is_file()}
    if missing := [split for split in ("train800", "val200", "test") if split not in rows]:
        raise UserError(f"{folder} has no {', '.join(f'{split}.txt' for split in missing)}.")
    union = [*rows["train800"], *rows["val200"]]
    if sorted(label for _, label in rows.setdefault(_UNION, union)) != sorted(label for _, label in union):
        raise UserError(f"{folder}: {_UNION}.txt has other labels than train800.txt and val200.txt together.")
    if check:
        _check_counts(task, folder, rows)
    files = {name_inside(path, folder): (size, mtime) for path, size, mtime in walk_files(folder)}
    collector = Collector(folder, dict.fromkeys(SPLITS, ""), by_folders=False)
    collector.classes = [str(label) for label in range(task.num_classes)]
    for split in SPLITS:
        for name, label in rows[split]:
            if name not in files:
                raise UserError(f"{folder}: {split}.txt names {name}, which is missing.")
            if not 0 <= label < task.num_classes:
                raise UserError(f"{folder}: {split}.txt gives {name} label {label} of {task.num_classes} classes.")
            size, mtime = files[name]
            collector.sample(split, name.rpartition(".")[0], [str(label)], name, -1, 0, size, mtime=mtime)
    return collector.finish()


def _read(path: AnyPath) -> list[tuple[str, int]]:
    rows = []
    for line in read_bytes(path).decode(errors="replace").splitlines():
        name, _, text = line.strip().rpartition(" ")
        if not name or (label := whole_number(text)) is None:
            raise UserError(f"{path}: {line!r} is not of the form 'images/train800/000000.jpg 12'.")
        rows.append((name, label))
    return rows


def _check_counts(task: Task, folder: AnyPath, rows: dict[str, list[tuple[str, int]]]) -> None:
    expected = dict(zip(SPLITS, (NUM_TRAIN, NUM_VAL, NUM_TRAIN + NUM_VAL, task.num_test), strict=True))
    for split, count in expected.items():
        if len(rows[split]) != count:
            raise UserError(f"{folder}: {split}.txt has {counted(len(rows[split]), 'image')}, but VTAB has {count:,}.")
