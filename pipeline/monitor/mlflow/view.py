"""The view of an experiment's runs that this project proposes: columns of the list, and charts against images seen and FLOPs.

MLflow keeps saved views as tags of the experiment; they are listed under *Views*, and `?viewStateShareKey=KEY` in an address opens
one. The fields are those that the page of MLflow 3.17 saves; unknown fields are ignored, missing ones have their defaults.
"""

import json
from typing import Any

VIEW_KEY = "overview"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
_SAVED = 1_764_000_000_000  # Milliseconds since 1970. The page lists views by it; a fixed time keeps the tag the same.

# Of the run list, from left to right, and their widths in pixels. Columns without content in a store are not shown.
_COLUMNS = {
    "metrics.`score`": 70,  # In per cent: sorts. The tag says it in words, with the data.
    "tags.`score`": 170,
    "tags.`kind`": 90,
    "tags.`outcome`": 150,
    "tags.`model`": 100,
    "tags.`parent`": 150,
    "tags.`progress`": 170,
    "tags.`dataset`": 110,
    "attributes.`Models`": 150,
    "attributes.`Source`": 160,
}
# Columns that are always shown, and stay first.
_FIXED = {"attributes.`Run Name`": 180, "attributes.`Created`": 130}
# (section, its charts: metric, x axis). MLflow adds charts of the other metrics to the section of their group.
_SECTIONS = [
    ("by images seen", [("eval/val_top1", "train/images_seen"), ("train/loss", "train/images_seen")]),
    ("by exaFLOPs", [("eval/val_top1", "train/exaflops"), ("train/loss", "train/exaflops")]),
    ("eval", [("eval/val_top1", "")]),
    ("probe", []),
    ("train", [("train/loss", "")]),
    ("speed", []),
    ("health", []),
    ("Model metrics", []),  # Metrics without a group.
    ("System metrics", []),
]


def view_tag() -> str:
    """Value of the experiment's tag VIEW_TAG."""
    state = {
        "selectedColumns": list(_COLUMNS),
        "columnOrder": [*_FIXED, *_COLUMNS],
        "columnWidths": _FIXED | _COLUMNS,
        "runsHiddenMode": "FIRST_20_RUNS",
        "isAccordionReordered": True,  # Sections stay in this order.
        "compareRunSections": [
            {"uuid": name, "name": name, "display": True, "isReordered": False} for name, _ in _SECTIONS
        ],
        "compareRunCharts": [_chart(section, metric, x) for section, charts in _SECTIONS for metric, x in charts],
    }
    return json.dumps({"name": "Overview", "createdAt": _SAVED, "updatedAt": _SAVED, "state": json.dumps(state)})


def _chart(section: str, metric: str, x: str) -> dict[str, Any]:
    """A line chart of a metric. x: the metric on the x axis; empty is the step."""
    axis = (
        {"xAxisKey": "metric", "selectedXAxisMetricKey": x, "useGlobalXaxisKey": False} if x else {"xAxisKey": "step"}
    )
    return {
        "uuid": f"{section} {metric}", "type": "LINE", "metricSectionId": section, "metricKey": metric, "isGenerated": not x,
        "runsCountToCompare": 20, "lineSmoothness": 0, "scaleType": "linear", "xAxisScaleType": "linear", "range": {},
        "yAxisKey": "metric", "yAxisExpressions": [], "useGlobalLineSmoothing": True, "useGlobalXaxisKey": True, **axis,
    }  # fmt: skip
