"""The view of an experiment's runs that this project proposes: columns of the list, and charts against images seen and
FLOPs.

MLflow keeps saved views as tags of the experiment; they are listed under *Views*, and `?viewStateShareKey=KEY` in an
address opens one. The fields are those that the page of
MLflow 3.17 saves; unknown fields are ignored, missing ones have their defaults.
"""

import json
from typing import Any

from pipeline.architecture.objectives import OBJECTIVES

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
_IMAGES, _FLOPS = "train/images_seen", "train/exaflops"
# Closed sections, to which MLflow adds charts of all metrics of a group; "Model metrics" has those without a group.
_CLOSED = ("eval", "probe", "train", "speed", "health", "Model metrics")
_LARGE = {"columns": 2, "cardHeight": 400}


def view_tag() -> str:
    """Value of the experiment's tag VIEW_TAG."""
    kinds = ["" if kind == "softmax" else f"_{kind}" for kind in OBJECTIVES]
    losses = [f"{name}{kind}" for kind in kinds for name in ("train/loss", "eval/val_loss")]
    # Open sections, with large charts: (section, its charts: metric, x axis). MLflow hides charts without points.
    # Losses of different objectives have charts of their own, because they do not compare.
    sections = [
        (
            "Score in per cent",
            [(name, x) for name in ("score", *(f"score_{kind}" for kind in _KINDS)) for x in (_IMAGES, _FLOPS)],
        ),
        ("Loss by objective", [(loss, _IMAGES) for loss in losses]),
    ]
    state = {
        "selectedColumns": list(_COLUMNS),
        "columnOrder": [*_FIXED, *_COLUMNS],
        "columnWidths": _FIXED | _COLUMNS,
        "runsHiddenMode": "FIRST_20_RUNS",
        "isAccordionReordered": True,  # Sections stay in this order.
        "compareRunSections": [
            *({"uuid": name, "name": name, "display": True, "isReordered": False, **_LARGE} for name, _ in sections),
            *({"uuid": name, "name": name, "display": False, "isReordered": False} for name in _CLOSED),
        ],
        "compareRunCharts": [_chart(section, metric, x) for section, charts in sections for metric, x in charts],
    }
    return json.dumps({"name": "Overview", "createdAt": _SAVED, "updatedAt": _SAVED, "state": json.dumps(state)})


def _chart(section: str, metric: str, x: str) -> dict[str, Any]:
    """A line chart of a metric. x: the metric on the x axis."""
    return {
        "uuid": f"{section} {metric} {x}",
        "type": "LINE",
        "metricSectionId": section,
        "metricKey": metric,
        "isGenerated": False,
        "runsCountToCompare": 20,
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "range": {},
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "useGlobalLineSmoothing": True,
        "useGlobalXaxisKey": False,
        "xAxisKey": "metric",
        "selectedXAxisMetricKey": x,
    }
