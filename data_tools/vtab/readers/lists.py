"""Reads the copies of VTAB-1k that are common among users of PyTorch: images, and lists of `images/train800/000000.jpg
12`.

They were exported from tensorflow_datasets (NOAH/get_vtab1k.py and its derivatives); the images were encoded again and
named by number. Without the original keys, the splits cannot be proved.
"""

from collections.abc import Container

from data_tools.sources.listing import Collector, Listing
from data_tools.vtab.split import NUM_TRAIN, NUM_VAL, SPLITS
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath, name_inside, walk_files
from pipeline.experiment.vtab_tasks import Task
from pipeline.settings.quantities import whole_number

# Names of a task's folder in NOAH and other projects, besides its own.
_FOLDERS = {
    "cifar100": ["cifar", "cifar_100"],
    "flowers102": ["oxford_flowers102"],
    "pets": ["oxford_iiit_pet"],
    "retinopathy": ["diabetic_retinopathy"],
    "clevr_distance": ["clevr_dist"],
    "kitti_distance": ["kitti"],
    "dsprites_location": ["dsprites_loc"],
    "dsprites_orientation": ["dsprites_ori"],
    "smallnorb_azimuth": ["smallnorb_azi"],
    "smallnorb_elevation": ["smallnorb_ele"],
}
_UNION = "train800val200"


def folders(task: Task) -> list[str]:
    """Returns the names that the folder of a task may have."""
    return [*_FOLDERS.get(task.name, []), task.name]


def listing(task: Task, folder: AnyPath, check: bool) -> Listing:
    """List all samples. check: raise UserError for other numbers of images than those of VTAB."""
    files = {name_inside(path, folder): (size, mtime) for path, size, mtime in walk_files(folder)}
    rows = {
        split: _read(folder / f"{split}.txt", files, task.num_classes)
        for split in SPLITS
        if split != _UNION or f"{split}.txt" in files
    }
    union = [*rows["train800"], *rows["val200"]]
    if sorted(label for _, label in rows.setdefault(_UNION, union)) != sorted(label for _, label in union):
        raise UserError(f"{folder}: {_UNION}.txt has other labels than train800.txt and val200.txt together.")
    collector = Collector(folder, dict.fromkeys(SPLITS, ""), by_folders=False)
    collector.classes = [str(label) for label in range(task.num_classes)]
    for split, count in zip(SPLITS, (NUM_TRAIN, NUM_VAL, NUM_TRAIN + NUM_VAL, task.num_test), strict=True):
        if check and len(rows[split]) != count:
            raise UserError(f"{folder}: {split}.txt has {counted(len(rows[split]), 'image')}, but VTAB has {count:,}.")
        for name, label in rows[split]:
            size, mtime = files[name]
            collector.sample(split, name.rpartition(".")[0], [str(label)], name, -1, 0, size, mtime=mtime)
    return collector.finish()


def _read(path: AnyPath, files: Container[str | None], num_classes: int) -> list[tuple[str, int]]:
    if not path.is_file():
        raise UserError(f"{path} is missing.")
    rows = []
    for line in path.read_bytes().decode(errors="replace").splitlines():
        name, _, text = line.strip().rpartition(" ")
        label = whole_number(text)
        if name not in files or label is None or not 0 <= label < num_classes:
            raise UserError(
                f"{path}: {line!r} is not an existing file and its label, below {num_classes}, such as"
                " 'images/train800/000000.jpg 12'."
            )
        rows.append((name, label))
    return rows
