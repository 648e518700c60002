"""Parquet files with a column of encoded images, the format of Hugging Face data sets, or of arrays, which become .npy.

An image in a Parquet file cannot be read by offset, and shards need samples in random order. So the column is unpacked
once, into one file of concatenated images for each Parquet file. (Reading a row group of 100 images for each image
costs more.)
"""

import io
import json
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as types

from data_tools.sources.labels import TableColumns, is_list
from data_tools.sources.layouts.archive import damage_named, staged_path
from data_tools.sources.listing import Collector
from data_tools.sources.split_files import split_files
from pipeline.base.errors import UserError
from pipeline.base.json_record import shortened
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet
from pipeline.settings.commands.data import ShardConfig

_IMAGES_AT_ONCE, _VALUES_AT_ONCE = 64, 2**16


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every row of every *.parquet below source to the collector."""
    columns = TableColumns(config, collector)
    for split, name, path in split_files(source, collector.splits, ".parquet"):
        with damage_named(path, pa.ArrowException, OSError):
            # Not memory-mapped: all of it is read, once.
            file = open_parquet(path, memory_map=False, pre_buffer=False, buffer_size=2**20)
            schema = file.schema_arrow
            _, *wanted = columns.choose(schema.names, str(path), [("image_column", config.image_column)])
            columns.check(schema, str(path), _class_label_names(schema, columns.label))
            images, sizes = _unpack(path, file, config.image_column, staging)
            collector.unpacked[images] = path
            container, offset = collector.add_container(images), 0
            batches = file.iter_batches(_VALUES_AT_ONCE, columns=wanted)
            for row, values in enumerate(row for batch in batches for row in batch.to_pylist()):
                names, group, targets = columns.of_row(values, f"{path}, row {row}")
                key, size = f"{name.removesuffix('.parquet')}/{row:06d}", int(sizes[row])
                place = f"{name}, row {row}", container, offset, size
                collector.sample(split, key, names, *place, group=group, targets=targets)
                offset += size
    columns.finish()


def _class_label_names(schema: pa.Schema, column: str) -> list[str]:
    """Class names of the numbers in `column`, from the schema metadata that Hugging Face's `datasets` writes; []
    without.
    """
    metadata = (schema.metadata or {}).get(b"huggingface", b"{}")
    feature: Any = json.loads(metadata).get("info", {}).get("features", {}).get(column, {})
    # Lists of labels: {"feature": {"names": ...}, "_type": "Sequence"}, or in older versions [{"names": ...}].
    feature = feature[0] if isinstance(feature, list) else feature.get("feature") or feature
    return feature.get("names") or []


def holds_images(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold images: encoded (binary, or struct<bytes, path>), or arrays."""
    if types.is_struct(kind):
        kind = kind.field("bytes").type if kind.get_field_index("bytes") >= 0 else kind
    return str(kind) in ("binary", "large_binary", "binary_view") or _holds_arrays(kind)


def _holds_arrays(kind: pa.DataType) -> bool:
    """Whether each row is an array of numbers: lists of lists, as of Hugging Face's Array2D."""
    depth = 0
    while is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth > 1 and (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _npy(value: pa.ListScalar) -> bytes:
    """An .npy of one row of lists. Lists of different lengths become a flat array, which the job finds bad."""
    if not value.is_valid:
        return b""
    values, shape = value.values, [len(value.values)]
    while is_list(values.type):
        lengths = pc.unique(pc.list_value_length(values)).to_pylist()
        shape = [*shape, *lengths] if len(lengths) == 1 and shape != [-1] else [-1]
        values = values.flatten()
    file = io.BytesIO()
    np.save(file, values.to_numpy(zero_copy_only=False).reshape(shape))
    return file.getvalue()


def _unpack(path: AnyPath, file: pq.ParquetFile, column: str, staging: AnyPath) -> tuple[AnyPath, np.ndarray]:
    """Returns (file of the column's concatenated images, their (rows,) int64 sizes). Unpacked once."""
    kind = file.schema_arrow.field(column).type
    if not holds_images(kind):
        raise UserError(
            f"{path}: column {column!r} holds {shortened(str(kind))}, not encoded images (binary, or struct<bytes,"
            " path>), and not arrays (lists of lists of numbers)."
        )
    are_arrays, is_struct = _holds_arrays(kind), types.is_struct(kind)
    name = quote(column, safe="")  # For example image/encoded.
    images, table = (staged_path(path, staging, f".{name}.{ext}") for ext in ("images", "npy"))
    if table.exists() and images.exists():
        with table.open("rb") as file_of_sizes:
            return images, np.load(file_of_sizes)
    sizes: list[int] = []
    with replacing(images) as target:
        for batch in file.iter_batches(_IMAGES_AT_ONCE, columns=[column]):
            if are_arrays:
                sizes += [target.write(_npy(value)) for value in batch.column(column)]
                continue
            for image in batch.column(column).to_pylist():
                data = image["bytes"] if is_struct and image else image
                if data is None and image and image.get("path"):
                    raise UserError(
                        f"{path}, row {len(sizes)}: {column!r} names a file ({image['path']}) instead of holding it."
                        " Shard a list of such paths and their labels (CSV or Parquet): layout=list."
                    )
                # A row without an image is an empty file, which the job reports as unreadable.
                sizes.append(target.write(data or b""))
    with replacing(table) as target:
        np.save(target, np.array(sizes, np.int64))
    return images, np.array(sizes, np.int64)
