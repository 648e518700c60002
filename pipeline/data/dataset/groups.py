"""Groups of samples that are alike although none is a copy, such as those of a patient: how they are found and stored."""

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence

import pyarrow as pa

from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted

# The column of samples.parquet that names the group of each sample, if they have groups.
GROUP = pa.field("group", pa.dictionary(pa.int32(), pa.string()))
# Of processor time, for so many keys: ordinary patterns take milliseconds.
_SECONDS, _KEYS_AT_ONCE = 10.0, 2**10


def group_finder(pattern: str) -> Callable[[Sequence[str]], list[str]]:
    """Returns the function keys -> their groups, which raises UserError for a key without one, and if the search does not end."""
    search, number = re.compile(pattern).search, min(1, re.compile(pattern).groups)

    def find(keys: Sequence[str]) -> list[str]:
        groups = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[start : start + _KEYS_AT_ONCE]
            with _limited(pattern, some[0]):
                found = [search(key) for key in some]
            for key, match in zip(some, found, strict=True):
                group = match[number] if match else None
                if not group:
                    raise UserError(
                        f"group_pattern = {quoted(pattern)} finds no group in the key {key!r}. Extend it, or shard such images into a data "
                        "set of their own."
                    )
                groups.append(group)
        return groups

    return find


def refuse_one_group(pattern: str, groups: Collection[str], num_images: int) -> None:
    """Raises UserError if all images are of one group. groups: at least two of them, if there are two."""
    if num_images > 1 and len(set(groups)) == 1:
        raise UserError(
            f"group_pattern = {quoted(pattern)} finds one group, {next(iter(groups))!r}, for all {num_images:,} images, so that none could be "
            "held out. Match what differs between groups, too, as 'patient[0-9]+' does and 'patient' does not."
        )


@contextlib.contextmanager
def _limited(pattern: str, key: str) -> Iterator[None]:
    """Ends a search that tries too many ways to match, such as (a+)+b, with a UserError. Only in the main thread, which gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise UserError(
            f"group_pattern = {quoted(pattern)} takes over {_SECONDS:.0f} s to search {_KEYS_AT_ONCE:,} keys such as {key!r}: there are too "
            "many ways to match. Write it without a repetition of a repetition, such as (a+)+ or (.*)* ."
        )

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
