"""Requests about child runs to an MLflow server or database."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.monitor.mlflow.store import MlflowStore

# Runs that one request lists.
_MAX_RUNS = 1000
# Tag by which MLflow shows a run below another.
PARENT_TAG = "mlflow.parentRunId"


@dataclass(frozen=True)
class KnownChild:
    """A child run that a store has. key: what tells it from the other children. digest: of what was sent of it."""

    key: str
    run_id: str
    status: str
    digest: str


class ChildStore(MlflowStore):
    """An MLflow store with requests about child runs. Methods raise what MLflow raises."""

    def find_children(
        self, experiment_id: str, parent: str, key: str, digest: str, before_request: Callable[[], None]
    ) -> Iterator[KnownChild]:
        """Yield the child runs of a run. key, digest: tags that hold these. before_request: called before each request."""
        mine, token = f"tags.`{PARENT_TAG}` = '{parent}' AND tags.`{key}` != ''", None
        while True:
            before_request()
            page = self.client.search_runs([experiment_id], mine, max_results=_MAX_RUNS, page_token=token)
            for run in page:
                tags = run.data.tags
                yield KnownChild(tags[key], run.info.run_id, run.info.status, tags.get(digest, ""))
            if not (token := page.token):
                return

    def nest(self, run_id: str, parent: str) -> None:
        """Show a run below another. Raises LookupError if it does not exist."""
        if not self.is_active(run_id):
            raise LookupError(run_id)
        self.client.set_tag(run_id, PARENT_TAG, parent)
