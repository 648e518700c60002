"""Tells requests that an MLflow store refuses (never sent again) from outages (sent later)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pipeline.base.words import on_one_line
from pipeline.monitor.export import Exporter, warn
from pipeline.monitor.mlflow.connection import active_run
from pipeline.monitor.run_page import hide_passwords

T = TypeVar("T")

_MAX_REASON = 300
# In the text of an error: MLflow has no code for it.
_TOO_LARGE = "failed with error code 413 "


class RefusableExporter(Exporter):
    """An exporter whose store refuses items, which it would refuse again: each is reported once and skipped.

    refused: what will never arrive in this store.
    """

    client: Any
    refused: set[str]

    def allows(self, name: str, request: Callable[[], object], optional: bool = False) -> bool:
        """Make a request for what `name` names; returns False when it is refused, now or before. Raises other errors.

        optional: a store that has no such request refuses it.
        """
        if name in self.refused:
            return False
        if reason := self._reason(request, optional):
            self.refused.add(name)
            warn(f"MLflow refused {name} ({reason}): it will never arrive there, and the rest goes on.")
        return not reason

    def send_each(self, items: Sequence[T], name: Callable[[T], str], request: Callable[[Sequence[T]], object]) -> None:
        """Make one request for all items, or one for each if it is refused, so that only what the store refuses is left
        out.
        """
        if self._reason(partial(request, items)):
            for item in items:
                self.allows(name(item), partial(request, [item]))

    def _reason(self, request: Callable[[], object], optional: bool = False) -> str:
        """Why the store refused a request; "" if it did not. Raises other errors."""
        try:
            request()
        except Exception as error:
            # What was deleted, such as a version of a registered model, is not made again. Older servers have no logged
            # models; a server that does not know the request for metrics is not MLflow.
            missing = ("RESOURCE_DOES_NOT_EXIST", "ENDPOINT_NOT_FOUND")[: 1 + optional]
            is_refused = is_refusal(error) or getattr(error, "error_code", "") in missing
            if not is_refused or not active_run(self.client, self.sent.run_id):  # A deleted run refuses everything.
                raise
            return one_line(error) or type(error).__name__
        return ""


def is_refusal(error: Exception) -> bool:
    """Whether the store answered that a request is wrong, so that it would refuse it again.

    413 is of a web server before it, with a limit to the size of a request.
    """
    # Requests about artifacts raise HTTPError.
    status = getattr(getattr(error, "response", None), "status_code", 0)
    code = getattr(error, "error_code", "")
    return status in (400, 413) or code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST") or _TOO_LARGE in str(error)


def one_line(error: Exception) -> str:
    """The text of an exception, on one line without passwords.

    SQL statements with their values are left out, and so is the middle of a long text: the reason is often at the
    end.
    """
    text = hide_passwords(on_one_line(error).partition(" [SQL: ")[0])
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON // 2]} ... {text[-_MAX_REASON // 2 :]}"


def what_failed(error: Exception) -> str:
    """How a request to a store failed, and the reason in brackets."""
    return f"{'refused the run' if is_refusal(error) else 'cannot be reached'} ({one_line(error)})"
