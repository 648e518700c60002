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
# What is wrong with a store that answers with a status, or with an error of MLflow's that stands for it; and the way out.
_ACCESS = (
    "denies access",
    "check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
)
_NO_REQUEST = ("has no such request", "is this the address of an MLflow server, and its version at least 3?")
_ANSWERS: dict[str | int, tuple[str, str]] = {
    401: _ACCESS, 403: _ACCESS, 404: _NO_REQUEST,
    "UNAUTHENTICATED": _ACCESS, "PERMISSION_DENIED": _ACCESS, "ENDPOINT_NOT_FOUND": _NO_REQUEST,
}  # fmt: skip
_NO_TRUST = "CERTIFICATE_VERIFY_FAILED"


class Refusals:
    """What a store refused, which it would refuse again: each is said once and left out, and the rest goes on.

    warn: receives one line. names: what will never arrive in this store, with the reason.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.names: dict[str, str] = {}
        self._warn = warn

    def allows(
        self, store: MlflowStore, run_id: str, name: str, request: Callable[[], object], optional: bool = False
    ) -> bool:
        """Make a request for what `name` names; returns False when it is refused, now or before. Raises other errors.

        optional: a store that has no such request refuses it.
        """
        if name in self.names:
            return False
        if (reason := self._reason(store, run_id, request, optional)) is None:
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
    def _reason(store: MlflowStore, run_id: str, request: Callable[[], object], optional: bool = False) -> str | None:
        """Why the store refused a request; None if it did not. Raises other errors."""
        try:
            request()
        except Exception as error:
            # What somebody has deleted, as a version of a registered model, is not made again. An older server has no logged models; a
            # server without the request for metrics is none of MLflow.
            missing = {"RESOURCE_DOES_NOT_EXIST", *(["ENDPOINT_NOT_FOUND"] if optional else [])}
            is_missing = getattr(error, "error_code", "") in missing
            # A deleted run refuses everything, which is no refusal of this.
            if not (is_refusal(error) or is_missing) or not store.is_active(run_id):
                raise
            return one_line(error)
        return None


def one_line(error: Exception) -> str:
    """What an exception says, on one line without passwords, and the way out if it is known.

    Of a database's, the statement with its values is left out; of another long one the middle: the reason is often at the end.
    """
    text = hide_passwords(on_one_line(error).partition(" [SQL: ")[0])
    text = text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON // 2]} ... {text[-_MAX_REASON // 2 :]}"
    _, way_out = _answer(error)
    if _NO_TRUST in str(error):
        way_out = "set MLFLOW_TRACKING_SERVER_CERT_PATH to a file with the certificate of its authority"
    return f"{text}; {way_out}" if way_out else text


def what_failed(error: Exception) -> str:
    """What a store did that did not carry out a request, as "cannot be reached", and why, in brackets."""
    what, _ = ("refused the run", "") if is_refusal(error) else _answer(error)
    return f"{what} ({one_line(error)})"


def _answer(error: Exception) -> tuple[str, str]:
    """Returns (what is wrong with the store, the way out or nothing)."""
    # Requests about artifacts raise HTTPError.
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return _ANSWERS.get(getattr(error, "error_code", "") or status, ("cannot be reached", ""))


def warn(line: str) -> None:
    try:
        print(f"warning: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # The terminal was closed: what sends to MLflow goes on.
        silence_broken_output()
