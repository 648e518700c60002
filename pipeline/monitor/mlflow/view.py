"""The view of an experiment's runs that this project proposes: the columns of the list.

MLflow keeps saved views as tags of the experiment; they are listed under *Views*, and `?viewStateShareKey=KEY` in an
address opens one. The fields are those that the page of
MLflow 3.17 saves; unknown fields are ignored, missing ones have their defaults.
"""

import json

VIEW_KEY = "overview"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
_SAVED = 1_764_000_000_000  # Milliseconds since 1970. The page lists views by it; a fixed time keeps the tag the same.

# Columns of the run list, left to right, and their widths in pixels; the important ones first: a window of 1,366 has
# 700 left beside MLflow's menu and the fixed columns. Columns without content in a store are not shown. MLflow sorts by
# metrics, not by tags: so `score` is both. Scores of other kinds than top-1 have columns of their own.
_KINDS = ("knn", "linear", "miou")
_COLUMNS = {
    "metrics.`score`": 80,
    **{f"metrics.`score_{kind}`": 90 for kind in _KINDS},
    "tags.`score`": 180,
    "tags.`dataset`": 120,
    "tags.`model`": 125,
    "tags.`outcome`": 130,
    "tags.`kind`": 90,
    "tags.`progress`": 165,
    "tags.`parent`": 170,
    "attributes.`Models`": 150,
    "attributes.`Source`": 160,
}
# Columns that are always shown, and stay first.
_FIXED = {"attributes.`Run Name`": 180, "attributes.`Created`": 130}


def view_tag() -> str:
    """Value of the experiment's tag VIEW_TAG."""
    state = {
        "selectedColumns": list(_COLUMNS),
        "columnOrder": [*_FIXED, *_COLUMNS],
        "columnWidths": _FIXED | _COLUMNS,
        "runsHiddenMode": "FIRST_20_RUNS",
    }
    return json.dumps({"name": "Overview", "createdAt": _SAVED, "updatedAt": _SAVED, "state": json.dumps(state)})
