"""What each model gains over the first one, by the number of training images."""

from collections.abc import Sequence

from pipeline.base.page import Table
from pipeline.experiment.points import Point, Tested, points_of, tested
from pipeline.experiment.table import StudyResults


def differences(results: StudyResults) -> list[Tested]:
    """Each model minus the first of the study, by data size, the best first; [] if that one has no score."""
    # The longest run of each: these questions have one length.
    points = points_of(results)
    longest = {(p.data_size, p.model): p for p in sorted(points, key=lambda point: (point.data_size, point.exaflops))}
    firsts = {size: point for (size, name), point in longest.items() if name == results.models[0]}
    pairs = [(point, firsts[size]) for (size, _), point in longest.items() if size in firsts]
    found = tested([(point, first) for point, first in pairs if point is not first])
    return sorted(found, key=lambda one: (one.first.data_size, one.second.mean - one.first.mean))


def table(found: Sequence[Tested], results: StudyResults) -> Table:
    """Rows: the first model of each size, then those compared with it. Has their other scores, too."""
    others = [name for name in results.score_names if name != results.score]
    means = {name: {(p.model, p.data_size): p.mean for p in points_of(results, name)} for name in others}
    rows, shown = [], set[int]()

    def row(point: Point, *texts: str) -> tuple[str, ...]:
        more = [means[name].get((point.model, point.data_size)) for name in others]
        size = [f"{point.data_size:,}"] if results.counts_images else []
        scores = ("–" if mean is None else f"{100 * mean:.2f}" for mean in more)
        return (*size, point.model, f"{len(point.scores)}", point.text, *texts, *scores)

    for one in found:
        if one.second.data_size not in shown:
            shown.add(one.second.data_size)
            rows.append(row(one.second, "the first model", "", ""))
        rows.append(row(one.first, *one.texts))
    size = ["training images"] if results.counts_images else []
    titles = [f"{name}, %" for name in (results.score, *others)]
    header = (*size, "variant", "seeds", titles[0], "difference, points", "p, corrected", "difference", *titles[1:])
    return Table(header, rows)
