"""Figures of a study: score against data size or compute with the fitted laws, differences of an ablation, the paper's own points."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from pipeline.base.page import COLOURS, add_legend, png, style_axes
from pipeline.base.words import shorten
from pipeline.review.statistics import PAIRED
from pipeline.study.laws.fit import Prediction
from pipeline.study.report import published
from pipeline.study.report.answers import Answers, Line, Point, score_title

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
_STYLES = ("-", "--", ":", "-.")
_GREYS = ("0.25", "0.5", "0.7")
_FAMILY_GREY = "0.2"
# Of a family's models: the first is mixed with this share of black, the last with this share of white.
_TONES = (-0.5, 0.4)
_MAX_NAME = 34
_MAX_LAWS = 4
# How far points at the same x are drawn from each other, and all of them together, as shares of the axis: their bars would hide each other.
_APART, _MOST_APART, _CHECKS_APART = 0.011, 0.08, 0.02


def draw_scores(answers: Answers) -> bytes | None:
    """PNG of the score against data size or compute: means with 95 % intervals and single seeds, as the paper's Figures 3 to 5.

    Each model has a colour and a marker; the models of a family have shades of one colour. Where a law says something it is drawn with its band, the prediction for the next
    larger run, and what the law without the largest runs predicts for these. None if nothing can be drawn on a logarithmic axis.
    """
    points = [point for point in answers.points if point.x > 0]
    if not points:
        return None
    figure, axes = _figure(11, 5.6)
    looks = _Looks(answers)
    laws = _plotted_laws(answers)
    with_law = {line.name for line in laws}
    ends = _range(points, laws)
    asides = _asides(list(dict.fromkeys(point.model for point in points)), ends)
    for model in dict.fromkeys(point.model for point in points):
        own = sorted((point for point in points if point.model == model), key=lambda point: point.x)
        if answers.families:
            _connect(axes, own, asides, looks.colour(own[0].model), ":", 0.8)
        elif model not in with_law:
            _connect(axes, own, asides, looks.colour(model), looks.style(own[0]), 1.6)
        for point in own:
            _draw_point(axes, point, looks, asides[model])
    for line in answers.families:
        if line.name not in with_law:
            _connect(axes, line.points, asides, looks.line_colour(line), "-", 1.8)
    of_laws = _asides([line.name for line in laws], ends)
    for number, line in enumerate(laws, 1):
        after = max(asides.values()) * _span(ends) ** (_CHECKS_APART * number)
        _draw_law(axes, line, answers, looks, of_laws[line.name], after)
    paper = list(published.RUNS) if paper_is_near(answers) else []
    if paper:
        _draw_paper_runs(axes, published.data_set_of(answers.results.score) or 0)
        theirs = [run.exaflops for run in paper]
        ends = min(ends[0], *theirs), max(ends[1], *theirs)
    else:
        axes.set_ylim(*_limits(points, laws))
    _log_axis(axes, *ends, [] if paper else [point.x for point in points] + [ends[1]], 0.06)
    axes.set_xlabel(_x_title(answers))
    axes.set_ylabel(f"{score_title(answers.results)}, %", parse_math=False)
    _legend(axes, looks.handles(points) + _law_handles(laws) + (_paper_handles() if paper else []))
    return png(figure)


def draw_laws(answers: Answers) -> bytes | None:
    """PNG with a panel for each model's law that `draw_scores` has no room for; None if there is none."""
    if not answers.families and _plotted_laws(answers):
        return None
    several = {
        line.family
        for line in answers.families
        if len({p.model for p in answers.points if p.family == line.family}) > 1
    }
    lines = [
        line
        for line in answers.models
        if line.fit and not line.why_not and (not answers.families or line.family in several)
    ]
    if not lines:
        return None
    columns = min(3, len(lines))
    rows = -(-len(lines) // columns)
    figure = Figure(figsize=(max(7.5, 4.6 * columns), 3.7 * rows + 0.7), dpi=110, layout="constrained")
    looks = _Looks(answers)
    points = [point for line in lines for point in line.points]
    ends, limits = _range(points, lines), _limits(points, lines)
    for number, line in enumerate(lines, 1):
        axes = figure.add_subplot(rows, columns, number)
        _draw_law(axes, line, answers, looks, 1.0, _span(ends) ** _CHECKS_APART)
        for point in line.points:
            _draw_point(axes, point, looks)
        _log_axis(axes, *ends, [point.x for point in points] + [ends[1]], 0.13)
        axes.set_ylim(*limits)
        axes.set_title(shorten(line.name, _MAX_NAME), fontsize=10, parse_math=False)
        axes.set_xlabel(_x_title(answers))
        if (number - 1) % columns == 0:
            axes.set_ylabel(f"{score_title(answers.results)}, %", parse_math=False)
    figure.legend(handles=_law_handles(lines), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return png(figure)


def _plotted_laws(answers: Answers) -> list[Line]:
    """The laws of families, or of a few models: more bands would hide each other."""
    laws = [line for line in answers.lines if line.fit and not line.why_not]
    return laws if len(laws) <= _MAX_LAWS else []


def _x_title(answers: Answers) -> str:
    return answers.unit if answers.results.counts_images else f"compute of pre-training, {answers.unit}"


def _range(points: Sequence[Point], laws: Sequence[Line]) -> tuple[float, float]:
    xs = [point.x for point in points] + [line.prediction.x for line in laws if line.prediction]
    return min(xs), max(xs)


def _asides(names: Sequence[str], ends: tuple[float, float]) -> dict[str, float]:
    """The factor of x by which what belongs to each name is drawn aside, so that all are beside each other. ends: of the axis."""
    apart = min(_APART, _MOST_APART / len(names)) if names else 0.0
    return {name: _span(ends) ** (apart * (number - (len(names) - 1) / 2)) for number, name in enumerate(names)}


def _span(ends: tuple[float, float]) -> float:
    """How many times the last x of an axis is the first one."""
    return max(ends[1] / ends[0], 1.5)


def _connect(
    axes: Axes, points: Sequence[Point], asides: Mapping[str, float], colour: str, style: str, width: float
) -> None:
    axes.plot(
        [p.x * asides[p.model] for p in points], [100 * p.mean for p in points], style, color=colour, linewidth=width,
        alpha=0.6 if width < 1 else 1,
    )  # fmt: skip


def _draw_law(axes: Axes, line: Line, answers: Answers, looks: "_Looks", aside: float, check_aside: float) -> None:
    """aside, check_aside: factors of x at which the prediction and the check are drawn; see `_asides`."""
    assert line.fit
    colour, style = looks.line_colour(line), "-" if answers.families else looks.style(line.points[0])
    smallest, measured = (edge(point.x for point in line.points) for edge in (min, max))
    end = line.prediction.x if line.prediction else measured
    inside, beyond = np.geomspace(smallest, measured, 200), np.geomspace(measured, end, 100)
    law, low, high = line.fit.curve(np.concatenate([inside, beyond]))
    axes.fill_between(
        np.concatenate([inside, beyond]), 100 * (1 - high), 100 * (1 - low), color=colour, alpha=0.15, linewidth=0
    )
    axes.plot(inside, 100 * (1 - law[:200]), style, color=colour, linewidth=1.6)
    axes.plot(beyond, 100 * (1 - law[200:]), "--", color=colour, linewidth=1.1)
    if found := line.prediction:
        _draw_open(axes, found.x * aside, found, colour, "o")
    if left := line.holdout:
        # Beside the truth, which would hide it.
        _draw_open(axes, left.prediction.x * check_aside, left.prediction, colour, "D")


def _draw_open(axes: Axes, x: float, found: Prediction, colour: str, marker: str) -> None:
    axes.errorbar(
        [x], [100 * (1 - found.error)], yerr=[[100 * (found.high - found.error)], [100 * (found.error - found.low)]], fmt=marker,
        color=colour, markerfacecolor="white", markersize=6 if marker == "o" else 5, elinewidth=1, capsize=3, zorder=4,
    )  # fmt: skip


def _law_handles(laws: Sequence[Line]) -> list[Line2D]:
    """Say in a legend what the marks of laws mean."""
    grey = "0.25"
    found = [_entry("fitted law, 95 % band", grey)] if laws else []
    if any(line.prediction for line in laws):
        found.append(_entry("predicted, next larger run", grey, marker="o", markerfacecolor="white", linestyle="--"))
    if any(line.holdout for line in laws):
        label = "the largest, predicted from the others"
        found.append(_entry(label, grey, marker="D", markersize=5, markerfacecolor="white", linestyle="none"))
    return found


def _entry(label: str, colour: str, **look: Any) -> Line2D:
    """An entry of a legend."""
    return Line2D([], [], color=colour, label=label, **look)


def _limits(points: Sequence[Point], laws: Sequence[Line]) -> tuple[float, float]:
    """Per cent, of all scores, predictions and checks: bands may be far wider."""
    values = [score for point in points for score in (*_ends(point), *point.scores)]
    for line in laws:
        found = [one for one in (line.prediction, line.holdout.prediction if line.holdout else None) if one]
        values += [1 - error for one in found for error in (one.low, one.high)]
    low, high = 100 * min(values), 100 * max(values)
    margin = 0.06 * (high - low) or 1.0
    return max(0.0, low - margin) if low > 0 else -margin, min(100.0, high + margin) if high < 100 else 100 + margin


def draw_variants(answers: Answers) -> bytes | None:
    """PNG of an ablation: each model's difference to the first with its 95 % interval, the best at the top; None if there is none."""
    variants = answers.variants
    if len(variants) < 2:
        return None
    (base,) = [variant.point for variant in variants if variant.point.model == answers.baseline]
    figure, axes = _figure(9, 1.5 + 0.42 * len(variants))
    axes.axvline(0, color="0.35", linewidth=1)
    for place, variant in enumerate(variants):
        is_base = variant.point is base
        colour = "0.35" if is_base else COLOURS[0]
        # Beside a paired interval, the differences of the pairs.
        is_paired = variant.difference is not None and variant.difference.method == PAIRED
        beside = base.scores if is_paired else [base.mean] * len(variant.point.scores)
        seeds = [100 * (score - other) for score, other in zip(variant.point.scores, beside, strict=True)]
        if len(seeds) > 1:
            axes.plot(seeds, [place] * len(seeds), "o", color=colour, alpha=0.3, markersize=4, zorder=1)
        if one := variant.difference:
            axes.errorbar(
                [100 * one.value], [place], xerr=[[100 * (one.value - one.low)], [100 * (one.high - one.value)]], fmt="o",
                color=colour, capsize=3, elinewidth=1.3, markersize=6,
            )  # fmt: skip
        else:
            axes.plot([100 * variant.value], [place], "D" if is_base else "o", color=colour, markersize=6)
    labels = [
        f"{shorten(v.point.model, _MAX_NAME)}{' (baseline)' if v.point is base else ''}: {100 * v.point.mean:.2f} %"
        for v in variants
    ]
    axes.set_yticks(range(len(variants)), labels, parse_math=False)
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.set_xlabel(f"{score_title(answers.results)}: difference to the baseline, points", parse_math=False)
    axes.set_title("95 % interval of the difference; pale: single seeds", fontsize=9, color="0.35")
    style_axes(axes, "x")
    return png(figure)


def draw_paper(column: int) -> bytes:
    """PNG of the paper's Figure 5 from Table 6. column: of `published.DATA_SETS`."""
    figure, axes = _figure(7, 3.6)
    _draw_paper_runs(axes, column)
    xs = [run.exaflops for run in published.RUNS]
    _log_axis(axes, min(xs), max(xs), [], 0.06)
    axes.set_xlabel("compute of pre-training, exaFLOPs")
    axes.set_ylabel(f"top-1 accuracy, {published.DATA_SETS[column]}, %")
    axes.set_title("ViT paper, Table 6: JFT-300M, then fine-tuned", fontsize=10)
    _legend(axes, _paper_handles())
    return png(figure)


def paper_is_near(answers: Answers) -> bool:
    """Whether the paper's points belong on the same axes: the same kind of score, and compute within a tenth to ten times of theirs."""
    if answers.results.question != "scaling" or published.data_set_of(answers.results.score) is None:
        return False
    theirs, ours = [run.exaflops for run in published.RUNS], [point.exaflops for point in answers.points]
    return bool(ours) and max(ours) >= min(theirs) / 10 and min(ours) <= max(theirs) * 10


def _paper_families() -> list[str]:
    return list(dict.fromkeys(run.family for run in published.RUNS))


def _draw_paper_runs(axes: Axes, column: int) -> None:
    for number, family in enumerate(_paper_families()):
        own = [run for run in published.RUNS if run.family == family]
        axes.plot([run.exaflops for run in own], [run.scores[column] for run in own], linestyle="none",
                  color=_GREYS[number], marker=_MARKERS[number], markersize=5, zorder=1)  # fmt: skip


def _paper_handles() -> list[Line2D]:
    return [
        _entry(f"paper: {family}", _GREYS[n], marker=_MARKERS[n], linestyle="none")
        for n, family in enumerate(_paper_families())
    ]


# -------------------------------------------------------------------- looks
class _Looks:
    """A colour, a marker and a line style for each model, the same in all figures; no two models look alike.

    Where several families are compared, a family has a colour and its models have shades of it. Otherwise each model has a
    colour, and a single family's line is grey.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._has_families = bool(answers.families)
        of_family: dict[str, list[str]] = {}
        for cell in answers.results.cells:
            models = of_family.setdefault(cell.family, [])
            models += [cell.model] if cell.model not in models else []
        self._colours: dict[str, str] = {}
        self._of_family = dict.fromkeys(of_family, _FAMILY_GREY)
        self._places: dict[str, tuple[int, int]] = {}
        if self._has_families and len(of_family) > 1:
            for number, (family, models) in enumerate(of_family.items()):
                self._of_family[family] = COLOURS[number % len(COLOURS)]
                for place, (model, colour) in enumerate(
                    zip(models, _shades(self._of_family[family], len(models)), strict=True)
                ):
                    self._colours[model], self._places[model] = colour, (place, place)
            return
        for number, model in enumerate(model for models in of_family.values() for model in models):
            self._colours[model] = COLOURS[number % len(COLOURS)]
            self._places[model] = number, number // len(COLOURS)

    def colour(self, model: str) -> str:
        return self._colours[model]

    def line_colour(self, line: Line) -> str:
        """line: of a family or of a model."""
        is_family = any(line is family for family in self._answers.families)
        return self._of_family[line.family] if is_family else self._colours[line.name]

    def marker(self, point: Point) -> str:
        return _MARKERS[self._places[point.model][0] % len(_MARKERS)]

    def style(self, point: Point) -> str:
        return _STYLES[self._places[point.model][1] % len(_STYLES)]

    def handles(self, points: Sequence[Point]) -> list[Line2D]:
        """For a legend: families with their models below, or models alone."""
        found = []
        of_model = {point.model: point for point in points}
        for family in dict.fromkeys(point.family for point in points):
            own = [point for point in of_model.values() if point.family == family]
            if self._has_families:
                label = f"{shorten(family, _MAX_NAME)}, its best models"
                found.append(_entry(label, self._of_family[family], linewidth=1.8))
            for point in own:
                style = ":" if self._has_families else self.style(point)
                look = {"marker": self.marker(point), "markersize": 5.5, "linestyle": style}
                width = 0.8 if self._has_families else 1.4
                found.append(_entry(shorten(point.model, _MAX_NAME), self.colour(point.model), linewidth=width, **look))
        return found


def _shades(colour: str, count: int) -> list[str]:
    """From a darker to a lighter tone of a colour; of one, the colour itself."""
    if count == 1:
        return [colour]
    pure = np.array(to_rgb(colour))
    return [to_hex(pure * (1 + tone) if tone < 0 else pure + (1 - pure) * tone) for tone in np.linspace(*_TONES, count)]


def _draw_point(axes: Axes, point: Point, looks: _Looks, aside: float = 1.0) -> None:
    """aside: see `_asides`."""
    colour, marker, x = looks.colour(point.model), looks.marker(point), point.x * aside
    if len(point.scores) > 1:
        axes.plot([x] * len(point.scores), [100 * score for score in point.scores], marker, color=colour, alpha=0.25,
                  markersize=4, markeredgewidth=0, zorder=2)  # fmt: skip
    low, high = _ends(point)
    axes.errorbar(
        [x], [100 * point.mean], yerr=[[100 * (point.mean - low)], [100 * (high - point.mean)]], fmt=marker, color=colour,
        markersize=5.5, elinewidth=1, capsize=2.5, zorder=3,
    )  # fmt: skip


def _ends(point: Point) -> tuple[float, float]:
    """Both ends of the point's interval; its score twice if it has none. The mean is between them, also where it is rounded otherwise."""
    low, high = (point.interval.low, point.interval.high) if point.interval else (point.mean, point.mean)
    return min(low, point.mean), max(high, point.mean)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    return figure, figure.add_subplot()


def _log_axis(axes: Axes, low: float, high: float, ticks: Sequence[float], apart: float) -> None:
    """ticks: at these, if they are at least `apart` of the axis from each other; else at round values."""
    axes.set_xscale("log")
    span = _span((low, high))
    axes.set_xlim(low / span**0.06, high * span**0.08)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    places: list[float] = []
    for tick in sorted(ticks):
        if not places or tick > places[-1] * 1.05:
            places.append(tick)
    if places and min(np.diff(np.log(places)), default=1.0) >= apart * np.log(span):
        axes.set_xticks(places)
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if span < 200 else (1.0,), numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    style_axes(axes)


def _tick(value: float, _: object) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1e-4 else f"{value:.2g}".replace("e-0", "e-")


def _legend(axes: Axes, handles: list[Line2D]) -> None:
    add_legend(axes.figure, handles=handles, loc="outside right upper", fontsize=8)
