"""What an MLflow store refuses, as against a store that cannot be reached: the one is never sent again, the other waits."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from pipeline.base.words import on_one_line
from pipeline.monitor.mlflow.store import MlflowStore, is_refusal
from pipeline.monitor.run_page import hide_passwords
from pipeline.process.start import silence_broken_output

T = TypeVar("T")

_MAX_REASON = 300


class Refusals:
    """What a store refused, which it would refuse again: each is said once and left out, and the rest goes on.

    warn: receives one line. names: what will never arrive in this store, with the reason.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.names: dict[str, str] = {}
        self._warn = warn

    def allows(self, store: MlflowStore, run_id: str, name: str, request: Callable[[], object]) -> bool:
        """Make a request for what `name` names; returns False when it is refused, now or before. Raises other errors."""
        if name in self.names:
            return False
        if (reason := self._reason(store, run_id, request)) is None:
            return True
        self.names[name] = reason
        self._warn(f"MLflow refused {name} ({reason}): it will never arrive there, and the rest goes on.")
        return False

    def send_each(
        self,
        store: MlflowStore,
        run_id: str,
        items: Sequence[T],
        name: Callable[[T], str],
        request: Callable[[Sequence[T]], object],
    ) -> None:
        """Make one request for all items, or one for each if it is refused, so that only what the store refuses is left out."""
        if self._reason(store, run_id, partial(request, items)) is not None:
            for item in items:
                self.allows(store, run_id, name(item), partial(request, [item]))

    @staticmethod
    def _reason(store: MlflowStore, run_id: str, request: Callable[[], object]) -> str | None:
        """Why the store refused a request; None if it did not. Raises other errors."""
        try:
            request()
        except Exception as error:
            # What somebody has deleted, as a version of a registered model, is not made again. A deleted run refuses everything, which
            # is no refusal of this.
            is_missing = getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"
            if not (is_refusal(error) or is_missing) or not store.is_active(run_id):
                raise
            return one_line(error)
        return None


def one_line(error: Exception) -> str:
    """What an exception says, on one line without passwords.

    Of a database's, the statement with its values is left out; of another long one the middle: the reason is often at the end.
    """
    text = hide_passwords(on_one_line(error).partition(" [SQL: ")[0])
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON // 2]} ... {text[-_MAX_REASON // 2 :]}"


def warn(line: str) -> None:
    try:
        print(f"warning: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # The terminal was closed: what sends to MLflow goes on.
        silence_broken_output()
