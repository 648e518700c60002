"""Reading samples by offset from the shards of a split."""

import os
import threading
from collections import OrderedDict

import numpy as np

from pipeline.data.manifest import Split

# Ranks read a handful of shards at a time; the limit keeps long runs below the usual 1,024 open files.
_MAX_OPEN_FILES = 256


class ShardReader:
    """Reads the encoded bytes of samples of one split; safe to call from many threads."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._files: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, row: int) -> bytes:
        """The image file of sample `row`. Raises OSError when the shard is missing or shorter than the manifest says."""
        shard = int(self.split.shard_of(np.asarray(row)))
        size, offset = int(self.split.sizes[row]), int(self.split.offsets[row])
        with self._lock:
            if shard not in self._files:
                self._files[shard] = os.open(self.split.shard_paths[shard], os.O_RDONLY)
                if len(self._files) > _MAX_OPEN_FILES:
                    os.close(self._files.popitem(last=False)[1])
            self._files.move_to_end(shard)
            # Duplicated, so that another thread's eviction cannot close it under this read.
            file = os.dup(self._files[shard])
        try:
            data = os.pread(file, size, offset)
        finally:
            os.close(file)
        if len(data) != size:
            raise OSError(f"{self.split.shard_paths[shard]} ends before byte {offset + size}")
        return data

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
