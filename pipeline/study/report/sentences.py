"""A study's answer in a few plain sentences, and the sentences in place of what could not be answered."""

from collections import Counter
from collections.abc import Iterator, Sequence

from pipeline.base.words import counted
from pipeline.evaluate.intervals import Interval
from pipeline.review.statistics import LEVEL, ScoreDifference, in_words, listed
from pipeline.study.laws.fit import Estimate, Prediction
from pipeline.study.report.answers import AblationVariant, Answers, Lead, Line, score_title
from pipeline.transfer.score_table import unpublished_warning

_MAX_NAMED = 4


def sentences(answers: Answers) -> list[str]:
    """The answer, a few sentences: what was found, what is predicted, whether predictions held, what is missing, what is not VTAB's."""
    found = list(_missing(answers))
    if not answers.points:
        return found
    if answers.results.question == "ablation":
        return [*_of_variants(answers), *found]
    if answers.results.question == "labels":
        return [*_of_weights(answers), *found]
    return [*_of_leads(answers), *_of_optimal(answers), *_of_predictions(answers), *_of_checks(answers), *found]


def _missing(answers: Answers) -> Iterator[str]:
    results = answers.results
    if not answers.points:
        yield f"The study answers nothing yet: no cell has a score ({score_title(results)})."
    states = Counter(cell.state for cell in results.cells if cell.state != "done")
    if states:
        counts = ", ".join(
            f"{count} {'were not run' if state == 'not run' else state}" for state, count in states.items()
        )
        effect = (
            "; means leave these out, so they flatter a model that diverges"
            if states["diverged"] and answers.points
            else ""
        )
        yield f"{len(results.done)} of {counted(len(results.cells), 'cell')} are done ({counts}){effect}."
    scored = {cell.name for cell in results.scored(results.score)}
    if without := [cell.name for cell in results.done if cell.name not in scored]:
        yield f"Done, but without a usable {results.score}: {listed(without, _MAX_NAMED)}."
    named = {point.family for point in answers.points}
    if named and (absent := [name for name in results.families if name not in named]):
        yield f"Nothing is said of {listed(absent, _MAX_NAMED)}: no cell of {'it' if len(absent) == 1 else 'them'} has a score."
    yield from unpublished_warning(results.unpublished)


# -------------------------------------------------------------------- who wins
def _of_leads(answers: Answers) -> Iterator[str]:
    best = max(answers.points, key=lambda point: point.mean)
    if all(lead.best != best for lead in answers.leads):
        highest = (
            f"The highest score is {percent(best.mean, best.interval)}, of {best.model} at {amount(best.x, answers)}."
        )
        is_alone = len({point.model for point in answers.points}) > 1 and not answers.leads
        yield highest + (
            f" No two models have a score at the same number of {answers.unit}, so none is called better."
            if is_alone
            else ""
        )
    if not answers.leads:
        return
    groups: list[list[Lead]] = []
    for lead in answers.leads:
        if groups and groups[-1][0].best.model == lead.best.model:
            groups[-1].append(lead)
        else:
            groups.append([lead])
    parts = []
    for group in groups:
        xs = [number(lead.x, answers) for lead in group]
        parts.append(f"{group[0].best.model} at {xs[0]}{f' to {xs[-1]}' if len(xs) > 1 else ''}")
    unsure = [number(lead.x, answers) for lead in answers.leads if not lead.difference or lead.corrected >= LEVEL]
    if not unsure:
        start = "Each lead over the second" if len(answers.leads) > 1 else "The lead"
        sure = f"{start} is more than {_noise(answers.leads)}."
    elif len(unsure) == len(answers.leads):
        sure = "No lead over the second is sure: it may be noise."
    else:
        sure = f"The lead over the second may be noise at {listed(unsure, _MAX_NAMED)}."
    yield f"Best at the same number of {answers.unit}: {', '.join(parts)}. {sure}"


# -------------------------------------------------------------------- laws
def _of_optimal(answers: Answers) -> Iterator[str]:
    """The best model of the next larger budget."""
    if not answers.optimal:
        return
    budget, found = answers.optimal[-1]
    if isinstance(found, str):
        return
    missed = any(line.name == found.family and line.holdout and not line.holdout.is_inside for line in answers.models)
    yield (
        f"By the fitted laws, the best model for {amount(budget, answers)} is {found.family} (probability {100 * found.probability:.0f} %), "
        f"and it stays the best from {number(found.low, answers)} to {number(found.high, answers)}"
        f"{', though its law without the largest runs missed these' if missed else ''}."
    )


def _of_predictions(answers: Answers) -> Iterator[str]:
    predicted = _predicted(answers)
    if not predicted:
        reasons = [line.no_prediction for line in answers.lines]
        others = [line.name for line in answers.lines[1:]]
        more = f" There is none for {listed(others, _MAX_NAMED)} either." if others else ""
        yield f"There is no prediction for a larger run. {reasons[0]}{more}"
        return
    predicted.sort(key=lambda line: line.prediction.error if line.prediction else 1.0)
    texts = [
        f"{line.name} {prediction_text(line.prediction)} at {number(line.prediction.x, answers)}"
        for line in predicted[:_MAX_NAMED] if line.prediction
    ]  # fmt: skip
    yield f"Predicted for the next larger run: {', '.join(texts)} {answers.unit}."


def _predicted(answers: Answers) -> list[Line]:
    """The lines whose predictions the answer tells: of families, else of models."""
    return [line for line in answers.lines if line.prediction] or [line for line in answers.models if line.prediction]


def _of_checks(answers: Answers) -> Iterator[str]:
    predicted = _predicted(answers)
    checked = [line for line in predicted if line.holdout]
    if not checked:
        if predicted:
            yield "There is no check of this by leaving the largest runs out."
        return
    held = [line.name for line in checked if line.holdout and line.holdout.is_inside]
    failed = [line.name for line in checked if line.name not in held]
    if not failed:
        yield f"Laws fitted without the largest runs predicted these within their intervals ({listed(held, _MAX_NAMED)})."
    else:
        also = f", though they held for {listed(held, _MAX_NAMED)}" if held else ""
        yield (
            f"Laws fitted without the largest runs missed these for {listed(failed, _MAX_NAMED)}{also}: do not rely on the "
            f"prediction{'' if len(failed) == 1 else 's'} for {listed(failed, _MAX_NAMED)}."
        )


# -------------------------------------------------------------------- ablation
def _of_variants(answers: Answers) -> Iterator[str]:
    results = answers.results
    if not answers.baseline:
        yield f"There are no differences: {results.models[0]}, the first model, with which the others are compared, has no score."
        return
    others = [variant for variant in answers.variants if variant.point.model != answers.baseline]
    if not others:
        yield f"There are no differences: only {answers.baseline} has a score."
        return
    sure = [variant for variant in others if variant.difference and variant.corrected < LEVEL]
    unsure = [variant.point.model for variant in others if variant not in sure]
    if sure:
        texts = [f"{v.point.model} by {points(v.difference)}" for v in sure if v.difference]
        yield f"Of {counted(len(others), 'variant')}, {len(sure)} differ{'s' if len(sure) == 1 else ''} from {answers.baseline} by more than {_noise(sure)}: {', '.join(texts)}."
    if unsure:
        start = "The difference" if len(unsure) == 1 else "The differences"
        yield f"{start} of {listed(unsure, 8)} to {answers.baseline} may be noise."


def _of_weights(answers: Answers) -> Iterator[str]:
    """What the best weights gain over the first model, for each number of labelled images."""
    if not answers.baseline:
        yield f"There are no differences: {answers.results.models[0]}, the first model, with which the others are compared, has no score."
    # The variants are sorted by their number of images, and of each number the best comes first.
    best = {v.point.data_size: v for v in reversed(answers.variants) if v.point.model != answers.baseline}
    for variant in sorted(best.values(), key=lambda variant: variant.point.data_size):
        gain = points(variant.difference) if variant.difference else f"{100 * variant.value:+.2f} points"
        yield (
            f"With {counted(variant.point.data_size, 'labelled image')}, the best weights are {variant.point.model}: {percent(variant.point.mean, variant.point.interval)}, "
            f"{gain} to {answers.baseline} ({verdict(variant)})."
        )


def _noise(items: Sequence[Lead | AblationVariant]) -> str:
    return " or ".join(dict.fromkeys(item.difference.noise for item in items if item.difference))


def verdict(item: Lead | AblationVariant) -> str:
    return in_words(item.difference, item.corrected) if item.difference else "not known: a single run of each"


# -------------------------------------------------------------------- numbers
def number(x: float, answers: Answers) -> str:
    return f"{x:,.0f}" if answers.results.counts_images or x >= 1000 else f"{x:.3g}"


def amount(x: float, answers: Answers) -> str:
    return f"{number(x, answers)} {answers.unit}"


def percent(score: float, interval: Interval | None) -> str:
    return f"{100 * score:.2f} %" + (f" [{100 * interval.low:.2f}, {100 * interval.high:.2f}]" if interval else "")


def prediction_text(found: Prediction) -> str:
    return f"{100 * (1 - found.error):.2f} % [{100 * (1 - found.high):.2f}, {100 * (1 - found.low):.2f}]"


def points(found: ScoreDifference) -> str:
    return f"{100 * found.value:+.2f} points [{100 * found.low:+.2f}, {100 * found.high:+.2f}]"


def estimate(found: Estimate) -> str:
    high = f"{found.high:.3g}" if found.high < 1e6 else "no limit"
    return f"{found.value:.3g} [{found.low:.3g}, {high}]"


def refusals(lines: Sequence[Line]) -> list[str]:
    """Every sentence that stands in place of a fit, a prediction or a check; each once."""
    found = [text for line in lines for text in (line.why_not, line.no_prediction, line.no_check) if text]
    return list(dict.fromkeys(found))
