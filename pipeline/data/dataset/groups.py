"""Groups of samples that are alike although none is a copy, such as those of a patient: how they are found and
stored.
"""

import re
from collections.abc import Callable, Sequence

import pyarrow as pa

from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted

# The column of samples.parquet that names the group of each sample, if they have groups.
GROUP = pa.field("group", pa.dictionary(pa.int32(), pa.string()))


def group_finder(pattern: str) -> Callable[[Sequence[str]], list[str]]:
    """Returns the function keys -> their groups, which raises UserError for a key without one."""
    compiled = re.compile(pattern)

    def find(keys: Sequence[str]) -> list[str]:
        groups = []
        for key in keys:
            match = compiled.search(key)
            group = match[min(1, compiled.groups)] if match else None
            if not group:
                raise UserError(
                    f"group_pattern = {quoted(pattern)} finds no group in the key {key!r}. Extend it, or shard such"
                    " images into a data set of their own."
                )
            groups.append(group)
        return groups

    return find
