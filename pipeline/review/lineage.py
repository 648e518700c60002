"""Where a run came from and what came from it: data -> pre-training -> fine-tuning -> VTAB, as a picture.

Parents are found by the folder that init.weights names, or by the MLflow run that the run names as its parent; children are runs of
the same output folder, or MLflow runs whose tags name this run.
"""

import contextlib
import html
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.page import SvgImage
from pipeline.base.words import counted, shorten
from pipeline.monitor.run_page import WeightsOrigin
from pipeline.process.committed import checkpoints_of, run_of_checkpoint
from pipeline.review.reader import RunReader, from_folder, from_mlflow, is_run, run_id_in, weights_named_in
from pipeline.review.record import RunRecord

_MAX_ANCESTORS = 8
_MAX_CHILDREN = 8
_MAX_DESCENT = 3
# Tags by which an MLflow run names the run that it came from.
_PARENT_TAGS = ("parent_run_id", "pretraining_run_id", "mlflow.parentRunId")
KINDS = {"pretrain": "pre-training", "finetune": "fine-tuning", "grid": "grid of fine-tunings", "vtab": "VTAB-1k sweep"}

# Sizes in pixels. A character of a wide font, such as DejaVu Sans, takes 7 of them, so that lines end within their box.
_FONT, _WIDTH, _LINE, _PAD = 12, 252, 18, 10
_GAP_X, _GAP_Y, _MARGIN = 46, 16, 4
_NARROW_EDGE, _NARROW_WIDTH = 34, 310
_MAX_CHARACTERS, _MAX_NARROW_CHARACTERS = 33, 41
_FILL = {"run": "#ffffff", "data": "#f4f6f8", "weights": "#f4f6f8", "more": "#ffffff"}


@dataclass
class GraphNode:
    """A box of the picture. kind: run, data, weights or more. depth: column. lines: the first is its title."""

    key: str
    kind: str
    lines: list[str]
    is_subject: bool = False
    depth: int = 0

    @property
    def height(self) -> int:
        return 2 * _PAD + _LINE * len(self.lines) - 4


@dataclass
class Lineage:
    """Boxes by key, and arrows as (key, key). ignored: why runs beside this one could not be read, one line each."""

    boxes: dict[str, GraphNode] = field(default_factory=dict)
    arrows: list[tuple[str, str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def add(self, box: GraphNode) -> bool:
        """Returns whether the box is new."""
        is_new = box.key not in self.boxes
        self.boxes.setdefault(box.key, box)
        return is_new

    def lines(self) -> list[str]:
        """The same in words: one line for each arrow."""
        titles = {key: box.lines[0] for key, box in self.boxes.items()}
        return [f"{titles[a]} -> {titles[b]}" for a, b in self.arrows]


def lineage_of(record: RunRecord, reader: RunReader) -> Lineage:
    """The lineage of a run: all ancestors, and descendants of up to three generations."""
    found = Lineage()
    found.add(_run_box(record, is_subject=True))
    _add_data(found, record)
    _climb(found, record, reader)
    _descend(found, record, reader, 1)
    _place(found)
    return found


def drawing(found: Lineage) -> SvgImage:
    """The picture, beside each other for wide windows and below each other for narrow ones."""
    about = "Where this run came from and what came from it: " + ("; ".join(found.lines()) or "nothing is known")
    return SvgImage("lineage.svg", about, _wide_svg(found, about), _narrow_svg(found, about))


# ---------------------------------------------------------------------- finding
def _climb(found: Lineage, record: RunRecord, reader: RunReader) -> None:
    for _ in range(_MAX_ANCESTORS):
        origin = origin_of(record)
        parent = _parent(found, record, reader)
        if isinstance(parent, RunRecord):
            box = _run_box(parent, used=record.origin)
        elif origin or parent:
            known = [record.origin.title, *_used_lines(record.origin)] if record.origin else []
            title = Path(origin).name or origin if origin else "a run"
            box = GraphNode(f"weights {origin or parent}", "weights", [*(known or [title]), parent])
        else:
            return
        found.arrows.append((box.key, _key(record)))
        if not found.add(box) or not isinstance(parent, RunRecord):
            return
        _add_data(found, parent)
        record = parent


def origin_of(record: RunRecord) -> str:
    """Path of the weights that a run, a grid or a sweep began with; "" for a new model."""
    results = record.results
    checkpoint = results.get("checkpoint") or {}
    named = record.settings.get("init.weights") or checkpoint.get("path") or results.get("weights")
    return str(named or record.tags.get("weights") or record.tags.get("checkpoint") or "")


def _parent(found: Lineage, record: RunRecord, reader: RunReader) -> RunRecord | str:
    """The run that another began from; if it cannot be read, a phrase that says why."""
    origin, tried = origin_of(record), "weights of no run that is at hand"
    ids = [record.parents.get("parent"), *(record.tags.get(tag) for tag in _PARENT_TAGS), run_id_in(origin),
           (record.results.get("checkpoint") or {}).get("run_id")]  # fmt: skip
    run_id = next((text for text in ids if text), None)
    by_folder = _folder_of(origin) if record.folder is not None or not run_id else None
    try:
        if by_folder is not None:
            tried = "a run that cannot be read"
            return from_folder(by_folder)
        if run_id:
            tried = f"MLflow run {run_id[:8]}: not at hand"
            return from_mlflow(reader.store, run_id, with_points=False)
    except (UserError, OSError) as error:
        if by_folder is not None:
            found.ignored.append(str(error))
        return tried
    return tried if origin else ""


def _folder_of(weights: str) -> Path | None:
    """The run folder around weights, or of the run that keeps its checkpoints elsewhere (checkpoint.folder)."""
    if not weights or "://" in weights:
        return None
    path = Path(os.path.expanduser(weights))  # The checkpoint itself may have been removed since.
    around = (path, *path.absolute().parents[:3])
    return next((folder for folder in around if is_run(folder)), None) or run_of_checkpoint(path)


def _descend(found: Lineage, record: RunRecord, reader: RunReader, depth: int) -> None:
    if depth > _MAX_DESCENT:
        return
    in_folder = record.folder is not None
    addresses = list(_children_in_folder(found, record) if in_folder else _children_in_mlflow(record, reader))
    for address in addresses[:_MAX_CHILDREN]:
        try:
            child = from_folder(Path(address)) if in_folder else from_mlflow(reader.store, address, with_points=False)
        except (UserError, OSError) as error:  # A damaged run of the same folder is not this run's problem.
            found.ignored.append(str(error))
            continue
        box = _run_box(child)
        if child.origin and (begun := ", ".join(filter(None, [_step(child.origin), child.origin.score]))):
            box.lines.append(f"from {begun}")
        if (_key(record), box.key) not in found.arrows:
            found.arrows.append((_key(record), box.key))
        if found.add(box):
            _descend(found, child, reader, depth + 1)
    if len(addresses) > _MAX_CHILDREN:
        more = GraphNode(f"more of {_key(record)}", "more", [f"and {len(addresses) - _MAX_CHILDREN:,} more"])
        found.add(more)
        found.arrows.append((_key(record), more.key))


def _children_in_folder(found: Lineage, record: RunRecord) -> Iterator[str]:
    assert record.folder is not None
    mine = record.folder.resolve()
    places = {mine, Path(checkpoints_of(mine)).resolve()}
    neighbours: list[Path] = []
    with contextlib.suppress(PermissionError):  # A run may be readable in a folder that may not be listed.
        neighbours = [*mine.parent.iterdir()]
    for folder in sorted([*neighbours, *mine.glob("vtab/*")]):
        if folder == mine or not os.path.isdir(folder) or not is_run(folder):
            continue
        try:
            weights = os.path.expanduser(weights_named_in(folder))
            path = Path(os.path.realpath(weights)) if weights else None
        except (UserError, OSError) as error:
            found.ignored.append(str(error))
            continue
        if path is not None and not places.isdisjoint((path, *path.parents)):
            yield str(folder)


def _children_in_mlflow(record: RunRecord, reader: RunReader) -> Iterable[str]:
    assert record.run_id is not None
    found = (reader.store.runs_with_tag(tag, record.run_id) for tag in _PARENT_TAGS)
    return dict.fromkeys(itertools.chain.from_iterable(found))


# ---------------------------------------------------------------------- boxes
def _key(record: RunRecord) -> str:
    return f"run {record.run_id or (record.folder.resolve() if record.folder else record.address)}"


def _used_lines(used: WeightsOrigin) -> list[str]:
    """What a run took from another one, as it was then."""
    return [f"used: {', '.join(filter(None, [_step(used), used.score])) or used.sha256[:16]}"]


def _step(used: WeightsOrigin) -> str:
    return "" if used.step is None else f"step {used.step:,}"


def _run_box(record: RunRecord, is_subject: bool = False, used: WeightsOrigin | None = None) -> GraphNode:
    """used: what the run below began with, which is shown instead of the last score: that may be of later weights."""
    data = record.dataset("training")
    lines = [record.name, KINDS.get(record.kind, record.kind)]
    lines += [text for text in (record.model, f"{data.name} {data.digest[:16]}".strip() if data else "") if text]
    if used is not None:
        lines += _used_lines(used)
    elif record.last_score is not None:
        lines.append(f"{record.last_score.name}: {record.last_score.metric.text(record.last_score.value)}")
    if record.status not in ("finished", ""):
        lines.append(record.status)
    return GraphNode(_key(record), "run", lines, is_subject)


def _add_data(found: Lineage, record: RunRecord) -> None:
    for data in record.datasets:
        if data.context != "training":
            continue
        sizes = (data.num_samples, "image"), (data.num_classes, "class")
        share = data.notes.get("share", "")
        lines = [
            data.name,
            f"data, split {data.split}" + f", {share}" * bool(share),
            data.digest,
            ", ".join(counted(number, thing) for number, thing in sizes if number),
        ]
        key = f"data {data.name} {data.split} {data.digest}"  # A mixture may have several splits of a set.
        found.add(GraphNode(key, "data", [line for line in lines if line]))
        found.arrows.append((key, _key(record)))


def _place(found: Lineage) -> None:
    """Set the column of each box: runs behind what they came from, data right before the first run that uses it."""
    for _ in found.boxes:  # As many rounds as the longest path could have.
        for a, b in found.arrows:
            found.boxes[b].depth = max(found.boxes[b].depth, found.boxes[a].depth + 1)
    for key, box in found.boxes.items():
        if box.kind == "data":
            box.depth = min(found.boxes[b].depth for a, b in found.arrows if a == key) - 1


# ---------------------------------------------------------------------- drawing
def _wide_svg(found: Lineage, about: str) -> str:
    columns: dict[int, list[GraphNode]] = {}
    for box in sorted(found.boxes.values(), key=lambda box: (box.depth, box.kind == "data")):
        columns.setdefault(box.depth, []).append(box)
    heights = {depth: sum(box.height + _GAP_Y for box in boxes) - _GAP_Y for depth, boxes in columns.items()}
    height = max(heights.values()) + 2 * _MARGIN
    corners: dict[str, tuple[float, float]] = {}
    for place, (depth, boxes) in enumerate(sorted(columns.items())):
        y = _MARGIN + (height - 2 * _MARGIN - heights[depth]) / 2
        for box in boxes:
            corners[box.key] = (_MARGIN + place * (_WIDTH + _GAP_X), y)
            y += box.height + _GAP_Y
    width = 2 * _MARGIN + len(columns) * (_WIDTH + _GAP_X) - _GAP_X
    arrows = []
    for a, b in found.arrows:
        x1, y1 = corners[a][0] + _WIDTH, corners[a][1] + found.boxes[a].height / 2
        x2, y2 = corners[b][0], corners[b][1] + found.boxes[b].height / 2
        middle = (x1 + x2) / 2
        arrows.append(f"M{x1:g},{y1:g} C{middle:g},{y1:g} {middle:g},{y2:g} {x2 - 7:g},{y2:g}")
    shapes = [_box_svg(box, *corners[box.key], _WIDTH, _MAX_CHARACTERS) for box in found.boxes.values()]
    return _svg(width, height, arrows, shapes, about, "wide")


def _narrow_svg(found: Lineage, about: str) -> str:
    y, tops = float(_MARGIN), dict[str, float]()
    boxes = sorted(found.boxes.values(), key=lambda box: (box.depth, box.kind == "data"))
    for box in boxes:
        tops[box.key] = y
        y += box.height + _GAP_Y
    arrows = []
    for a, b in found.arrows:
        y1, y2 = (tops[key] + found.boxes[key].height / 2 for key in (a, b))
        arrows.append(f"M{_NARROW_EDGE},{y1:g} C2,{y1:g} 2,{y2:g} {_NARROW_EDGE - 7},{y2:g}")
    shapes = [_box_svg(box, _NARROW_EDGE, tops[box.key], _NARROW_WIDTH, _MAX_NARROW_CHARACTERS) for box in boxes]
    return _svg(_NARROW_EDGE + _NARROW_WIDTH + _MARGIN, y - _GAP_Y + _MARGIN, arrows, shapes, about, "narrow")


def _box_svg(box: GraphNode, x: float, y: float, width: int, most: int) -> str:
    stroke, thickness, fill = ("#0072B2", 2.5, "#e6f1f9") if box.is_subject else ("#777777", 1, _FILL[box.kind])
    dash = ' stroke-dasharray="4 3"' if box.kind != "run" else ""
    texts = []
    for number, line in enumerate(box.lines):
        weight = ' font-weight="600"' if number == 0 else ""
        texts.append(
            f'<text x="{x + _PAD:g}" y="{y + _PAD + 12 + number * _LINE:g}"{weight}>{html.escape(shorten(line, most))}</text>'
        )
    rectangle = (
        f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{box.height}" rx="6" fill="{fill}" stroke="{stroke}" '
    )
    rectangle += f'stroke-width="{thickness}"{dash}/>'
    return f"<g><title>{html.escape(' · '.join(box.lines))}</title>{rectangle}{''.join(texts)}</g>"


def _svg(width: float, height: float, arrows: Sequence[str], shapes: Sequence[str], about: str, name: str) -> str:
    # Each picture of a page needs arrow heads of its own name.
    head = (
        f'<marker id="arrow-{name}" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    )
    head += '<path d="M0,0 L8,4 L0,8 z" fill="#555555"/></marker>'
    lines = "".join(
        f'<path d="{path}" fill="none" stroke="#555555" stroke-width="1.3" marker-end="url(#arrow-{name})"/>'
        for path in arrows
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{html.escape(about)}" font-family="system-ui, sans-serif" font-size="{_FONT}" fill="#1a1a1a">'
        f"<defs>{head}</defs>{lines}{''.join(shapes)}</svg>"
    )
