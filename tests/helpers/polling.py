"""Waiting for something that another thread or process does, however busy the machine is."""

import time
from collections.abc import Callable


def until(is_so: Callable[[], object], seconds: float = 300) -> None:
    """Ask until the answer is yes. A test that fails takes `seconds`; one that passes, no longer than what it waits
    for.
    """
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
