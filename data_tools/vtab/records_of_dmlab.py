"""The reader of DMLab, whose authors hand it out as TFRecord files."""

import numpy as np

from data_tools.vtab.files import Files, Place
from data_tools.vtab.original import Original, Pool
from data_tools.vtab.records import Example, records
from pipeline.data.bucket import to_path
from pipeline.errors import UserError
from pipeline.transfer.vtab_tasks import Task


def dmlab(files: Files, task: Task) -> Original:
    """dmlab-{train,validation,test}.tfrecord*: image (JPEG), filename (the key), label; read within the tar."""
    pools = {}
    for pool in ("train", "validation", "test"):
        keys, values, places = [], [], []
        for shard in files.beginning(f"dmlab-{pool}.tfrecord"):
            path = to_path(shard.archive) if shard.archive else files.folder / shard.name
            with path.open("rb") as file:
                for offset, data in records(file, shard.offset, shard.offset + shard.size, f"{path}: {shard.name}"):
                    try:
                        example = Example(data)
                        start, end = example.span("image")
                        keys.append(example.text("filename"))
                        values.append(example.integer("label"))
                    except (KeyError, ValueError) as error:
                        raise UserError(
                            f"{path}: {shard.name} has a record that is none of DMLab's ({error})."
                        ) from None
                    places.append(Place(keys[-1], str(path), offset + start, end - start))
        pools[pool] = Pool(keys, np.array(values, np.int64), places)
    return Original([str(number) for number in range(task.num_classes)], pools)
