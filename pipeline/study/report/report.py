"""The report of a study: its answer, figures, the table of all cells, how it was made, and the paper's points where they are comparable."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from pipeline.base.files import table_csv
from pipeline.base.page import Block, Heading, Paragraph, PngImage, Table, report
from pipeline.base.words import counted
from pipeline.data.storage.atomic import write_files
from pipeline.review.statistics import ScoreDifference
from pipeline.study.laws.fit import MAX_EXTRAPOLATION, Estimate
from pipeline.study.report import figures, published
from pipeline.study.report.answers import PAIRED_FROM, Answers, Line, answer, points_of, score_title
from pipeline.study.report.sentences import (
    estimate,
    number,
    percent,
    points,
    prediction_text,
    refusals,
    sentences,
    verdict,
)
from pipeline.study.results import CellResult, StudyResults

_TITLES = {
    "data_size": "how much data is enough",
    "scaling": "which model for which compute",
    "ablation": "what each part contributes",
    "labels": "what pre-trained weights are worth",
}
_CAPTIONS = {
    "score.png": "Means over seeds with their 95 % intervals (over the test images where there is a single seed); models at the same amount are drawn beside each other, and pale points are single seeds.",
    "laws.png": "The law of each model beside its runs.",
    "differences.png": "Differences to the first model.",
    "paper.png": "The paper's own points.",
}


def write_report(results: StudyResults, folder: Path) -> tuple[list[str], list[Path]]:
    """Write report.md, report.html, results.csv and the figures. Returns (the answer in sentences, the files)."""
    answers = answer(results)
    pictures = draw(answers)
    title = f"Study {results.name}: {_TITLES[results.question]}"
    blocks = list(page(answers, {name: png for name, png in pictures.items() if png}))
    files = {
        **pictures,
        **report(title, blocks),
        "results.csv": table_csv([csv_row(cell, score_names(results)) for cell in results.cells])
        if results.cells
        else None,
    }
    write_files(folder, files, mark="report.html")
    return sentences(answers), [folder / name for name, content in files.items() if content]


def draw(answers: Answers) -> dict[str, bytes | None]:
    """File name -> PNG, None for a figure that this study does not have."""
    is_ablation = answers.results.question == "ablation"
    is_far = answers.results.question == "scaling" and answers.points and not figures.paper_is_near(answers)
    return {
        "score.png": None if is_ablation else figures.draw_scores(answers),
        "laws.png": None if is_ablation else figures.draw_laws(answers),
        "differences.png": figures.draw_variants(answers) if is_ablation else None,
        "paper.png": figures.draw_paper(published.data_set_of(answers.results.score) or 0) if is_far else None,
    }


def page(answers: Answers, pictures: dict[str, bytes]) -> Iterator[Block]:
    """The blocks of the report. pictures: of `draw`."""
    for sentence in sentences(answers):
        yield Paragraph(sentence)
    for name in ("score.png", "laws.png", "differences.png"):
        if name in pictures:
            yield PngImage(name, _CAPTIONS[name], pictures[name])
    if "score.png" in pictures:
        yield Paragraph(f"{_CAPTIONS['score.png']}{_about_laws(answers)}")
    yield from _leads(answers)
    yield from _variants(answers)
    yield from _laws(answers)
    yield from _optimal(answers)
    yield from _cells(answers.results)
    yield Heading("How this was made")
    for text in method(answers):
        yield Paragraph(text)
    yield from _paper(answers, pictures)


def score_names(results: StudyResults) -> list[str]:
    """Names of the scores that any cell has; the study's own score comes first."""
    names = dict.fromkeys(name for cell in results.cells for name in cell.scores)
    return [results.score, *(name for name in names if name != results.score)]


def csv_row(cell: CellResult, names: list[str]) -> dict[str, object]:
    """A cell's facts, then its scores as shares; unknown values are empty."""
    facts = {
        name: value for name, value in asdict(cell).items() if name not in ("scores", "num_test", "effective_images")
    }
    return {**facts, **{name: cell.scores.get(name, "") for name in names}}


# -------------------------------------------------------------------- what follows
def _leads(answers: Answers) -> Iterator[Block]:
    if not answers.leads:
        return
    is_data = answers.results.counts_images
    yield Heading("Who wins at which data size" if is_data else "Which model wins at which budget")
    rows = [
        (
            number(lead.x, answers), lead.best.model, percent(lead.best.mean, lead.best.interval), lead.second.model,
            percent(lead.second.mean, lead.second.interval), points(lead.difference) if lead.difference else "–",
            f"{lead.corrected:.3g}" if lead.difference else "–", verdict(lead),
        )
        for lead in answers.leads
    ]  # fmt: skip
    yield Table(
        (answers.unit, "best", "score", "second", "score", "best minus second", "p, corrected", "difference"), rows
    )
    family = "all pairs of models at all of these sizes" if is_data else "all pairs of models at all budgets"
    yield _of_differences([lead.difference for lead in answers.leads], family)


def _variants(answers: Answers) -> Iterator[Block]:
    if not answers.variants:
        return
    yield Heading(f"Differences to {answers.baseline}")
    score, *others = score_names(answers.results)
    means = {
        name: {(point.model, point.data_size): point.mean for point in points_of(answers.results, name)}
        for name in others
    }
    by_size = answers.results.counts_images
    rows = []
    for variant in answers.variants:
        point, is_base = variant.point, variant.point.model == answers.baseline
        rows.append(
            (
                *([f"{point.data_size:,}"] if by_size else []), point.model, f"{len(point.scores)}", percent(point.mean, point.interval),
                "baseline" if is_base else points(variant.difference) if variant.difference else f"{100 * variant.value:+.2f} points",
                f"{variant.corrected:.3g}" if variant.difference else "–", "" if is_base else verdict(variant),
                *(f"{100 * mean:.2f}" if (mean := means[name].get((point.model, point.data_size))) is not None else "–" for name in others),
            )
        )  # fmt: skip
    header = (
        *(["training images"] if by_size else []),
        "variant", "seeds", f"{score}{answers.results.mark(score)} [95 %]", "difference [95 %]", "p, corrected", "difference",
    )  # fmt: skip
    yield Table((*header, *(f"{name}{answers.results.mark(name)}, %" for name in others)), rows)
    yield _of_differences([variant.difference for variant in answers.variants], "all variants")
    if len({variant.point.model for variant in answers.variants}) > 2:
        yield Paragraph(f"All are compared with {answers.baseline}; which of the others is better is not tested.")


def _of_differences(differences: list[ScoreDifference | None], family: str) -> Paragraph:
    methods = dict.fromkeys(one.method for one in differences if one)
    if not methods:
        return Paragraph("Single runs without a number of test images have no interval.")
    return Paragraph(
        f"Brackets are 95 % intervals, each for itself ({'; '.join(methods)}); p is corrected by Holm's method for {family}, and a "
        "difference is called more than the noise of the seeds, or of the test images where there are single runs only, below 0.05."
    )


def _about_laws(answers: Answers) -> str:
    if not any(line.fit and not line.why_not for line in answers.lines):
        return ""
    return (
        " Open circles are predictions for the next larger run with 95 % intervals; open diamonds, drawn a little to the right, what the law "
        "without the largest runs predicts for these."
    )


def _laws(answers: Answers) -> Iterator[Block]:
    # Families, and models unless they are their family's only one.
    lone = {line.name for line in answers.models if sum(one.family == line.family for one in answers.models) == 1}
    models = [line for line in answers.models if not answers.families or line.name not in lone]
    if not (lines := [*answers.families, *models]):
        return
    yield Heading("Laws, predictions and their check")
    rows = []
    for line in lines:
        if line.fit and not line.why_not:
            found, left = line.prediction, line.holdout
            rows.append(
                (
                    _name(line, answers), _limit(line.fit.floor),
                    estimate(line.fit.exponent), f"{100 * line.fit.deviation:.2f}",
                    f"{prediction_text(found)} at {number(found.x, answers)}" if found else "refused",
                    f"{prediction_text(left.prediction)}; measured {100 * (1 - left.error):.2f} %: {'inside' if left.is_inside else 'outside'}" if left else "refused",
                )
            )  # fmt: skip
    if rows:
        header = (
            "line",
            "limit of the score",
            "exponent",
            "scatter, points",
            f"next larger run, {answers.unit}",
            "largest runs, predicted from the others",
        )
        yield Table(header, rows)  # fmt: skip
    for text in refusals(lines):
        yield Paragraph(text)


def _limit(floor: Estimate) -> str:
    return f"{100 * (1 - floor.value):.1f} % [{100 * (1 - floor.high):.1f}, {100 * (1 - floor.low):.1f}]"


def _name(line: Line, answers: Answers) -> str:
    if not any(line is family for family in answers.families):
        return line.name
    return f"family {line.name}: {', '.join(dict.fromkeys(point.model for point in line.points))}"


def _optimal(answers: Answers) -> Iterator[Block]:
    if not answers.optimal:
        return
    yield Heading("Which model by the laws")
    rows = []
    for budget, found in answers.optimal:
        if isinstance(found, str):
            rows.append((number(budget, answers), "–", "–", "–", found))
            continue
        beyond = [f"{name} {side}" for name, side in ((found.below, "below"), (found.above, "above")) if name]
        rows.append(
            (
                number(budget, answers), found.family, f"{100 * (1 - found.prediction.error):.2f} %", f"{100 * found.probability:.0f} %",
                f"{number(found.low, answers)} to {number(found.high, answers)}" + (f" ({', '.join(beyond)})" if beyond else ""),
            )
        )  # fmt: skip
    yield Table(
        (
            answers.unit,
            "best model",
            "its score by the law",
            "probability that its law is the best",
            "range in which it stays best",
        ),
        rows,
    )
    left = {
        name: reason
        for _, found in answers.optimal
        if not isinstance(found, str)
        for name, reason in found.not_compared.items()
    }
    fitted = {line.name for line in answers.models if line.fit and not line.why_not}
    absent = [line.name for line in answers.models if line.name not in fitted]
    text = f"The last budget is the next larger one. The ranges are of the laws themselves, without their intervals, and end where laws are no longer used, {MAX_EXTRAPOLATION:g} times beyond the runs."
    if absent:
        text += f" Not compared, without a law: {', '.join(absent)}."
    yield Paragraph(text)
    for name, reason in left.items():
        yield Paragraph(f"{name} is not compared at every budget. {reason}")


# -------------------------------------------------------------------- cells
def _cells(results: StudyResults) -> Iterator[Block]:
    yield Heading("All cells")
    names = score_names(results)
    has_families = any(cell.family != cell.model for cell in results.cells)
    size, unit = results.unit
    rows = [
        (
            cell.name, *([cell.family] if has_families else []), cell.state if not cell.reason else f"{cell.state}: {cell.reason}",
            *(f"{100 * cell.scores[name]:.2f}" if name in cell.scores else "–" for name in names),
            f"{cell.data_size:,}", f"{cell.exaflops / size:.3g}", f"{cell.steps:,}", f"{cell.images_seen:,}", f"{cell.parameters:,}",
            "–" if cell.hours is None else f"{cell.hours:.2f}",
        )
        for cell in results.cells
    ]  # fmt: skip
    header = (
        "cell",
        *(["family"] if has_families else []),
        "state",
        *(f"{name}{results.mark(name)}, %" for name in names),
    )
    yield Table((*header, "training images", unit, "steps", "images seen", "parameters", "hours"), rows)


def method(answers: Answers) -> Iterator[str]:
    """Paragraphs: what was fitted, how the intervals were made, what is not claimed."""
    results = answers.results
    others = "other seeds or shots" if re.match(r"\d+shot", results.score) else "other seeds"
    yield (
        f"Data: {results.data}, fingerprint {results.fingerprint}; pre-training images have {results.image_size} px. Score: {score_title(results)}"
        f"{f' on {results.evaluated_on}' if results.evaluated_on else ''}. A point is the mean over the seeds of one model at one data size and length. "
        f"Its interval is Student's t over the seeds; a single run has Wilson's over its test images, which says nothing of {others}. results.csv has the scores of all cells as shares."
    )
    yield from (note for note in results.notes if note)
    if results.question == "labels":
        yield "Compute is that of the fine-tuning alone; notes above say what pre-training took."
    if results.question == "data_size" and answers.points:
        seen = sorted({cell.images_seen for cell in results.scored(results.score)})
        yield (
            f"All runs saw {counted(seen[0], 'image')}: smaller sets were repeated more often."
            if len(seen) == 1
            else f"Runs on more data were also longer ({seen[0]:,} to {counted(seen[-1], 'image')} seen): what more data bring includes what more training brings."
        )  # fmt: skip
    if answers.lines:
        is_shared = sum(line.fit is not None for line in answers.lines) > 1
        yield (
            f"Fitted by least squares: 1 - score = floor + scale x amount ^ -exponent, where the amount is the number of {answers.unit}, to lines of at least 4 "
            f"amounts. Intervals are of profile likelihood with Student's t at 95 %; that of a prediction includes the scatter of a new run. "
            f"{'The noise is taken to be the same for all lines and estimated from all together. ' if is_shared else ''}"
            "The next larger run is one average step further, at most 4 times; the check leaves all runs of the largest amount out, with the noise of the "
            "others where these tell it. A law whose fall may be noise gives no number, nor one whose interval is wider than the range of all measured errors."
        )
    if answers.families:
        yield (
            "A family's law goes through its best models only: the points that no other model of the family beats at the same compute or less. "
            "The best of several is chosen by its score, which makes this line a little too high, and where the best model changes it is no exact power law."
        )
    if answers.optimal:
        yield "The probability of the best model is the share of 1,000 bootstrap draws over cells and seeds in which its law is the best at that budget; where laws nearly agree, it says more than is known."
    yield (
        f"Differences of two models: by seed where both have the same {PAIRED_FROM} or more, else of the two means, with a common variance of the seeds, also of a single run; of "
        f"single runs over the test images, which says nothing of {others}."
    )
    if len({point.model for point in answers.points}) > 2:
        yield "The best of several models is chosen by its score, so this score, its interval, and what it gains over the first model are a little too high."
    if results.score == "best_top1":
        yield "The best evaluation of each run is chosen on the images that score it, so all scores are a little too high, most of all those of runs with many evaluations."
    yield (
        "Not claimed: that this holds on other data, at other image sizes, with other hyper-parameters or schedules; every cell was trained with the settings of the "
        "study, and a model whose settings suit it less is not thereby a worse model. Intervals over seeds, and p of these, leave out which images are in the test set: on others, a difference that is more than noise here may be none. Runs are taken to be "
        "independent, also those that share their first steps or parts of their data."
    )


# -------------------------------------------------------------------- the paper
def _paper(answers: Answers, pictures: dict[str, bytes]) -> Iterator[Block]:
    results = answers.results
    if not answers.points or results.question == "labels":
        return
    yield Heading("The paper's own points")
    if results.question == "data_size":
        yield Paragraph(
            f"Not shown: the {published.SOURCE} gives its Figures 3 and 4 as curves without numbers. Figure 4 asks the same on subsets of JFT-300M of 9 to 300 million "
            "images, by 5-shot linear accuracy on ImageNet: ResNets are ahead on the small ones, ViTs on the large ones."
        )  # fmt: skip
    elif results.question == "scaling":
        yield from _paper_scaling(answers, pictures)
    else:
        yield from _paper_positions(answers)


def _paper_scaling(answers: Answers, pictures: dict[str, bytes]) -> Iterator[Block]:
    column = published.data_set_of(answers.results.score)
    if column is None:
        yield Paragraph(
            f"{published.TABLE_6}. Its scores are of another kind than {score_title(answers.results)} here, and of other data, so they have a figure of their own: "
            "only its form can be compared, which family is ahead at equal compute, and whether the curves flatten."
        )  # fmt: skip
    else:
        where = (
            "in grey in the first figure"
            if figures.paper_is_near(answers)
            else "in a figure of their own, because their compute is over ten times from that here"
        )
        yield Paragraph(
            f"{published.TABLE_6}. Both are accuracy on {published.DATA_SETS[column]} after fine-tuning; the paper's points are {where}. They were pre-trained on "
            f"JFT-300M, ours on {answers.results.data}: differences are of the data as much as of the models."
        )  # fmt: skip
    if "paper.png" in pictures:
        yield PngImage("paper.png", _CAPTIONS["paper.png"], pictures["paper.png"])
    if column is not None:
        rows = [
            (run.model, run.family, f"{run.epochs}", f"{run.exaflops:g}", f"{run.scores[column]:.2f}")
            for run in published.RUNS
        ]
        yield Table(("model (paper)", "family", "epochs", "exaFLOPs", f"{published.DATA_SETS[column]}, %"), rows)


def _paper_positions(answers: Answers) -> Iterator[Block]:
    base = published.positions_of(answers.baseline)
    matched = [(v, row) for v in answers.variants if (row := published.positions_of(v.point.model))]
    if base is None or len(matched) < 2:
        yield Paragraph(
            "Not comparable: the paper gives numbers for position embeddings only (Table 8), its other ablations are curves."
        )
        return
    own = answers.results.score
    used = "5shot" if "5shot" in score_names(answers.results) else own
    ours = {point.model: point.mean for point in points_of(answers.results, used)}
    kind = (
        "the kind of score is the same"
        if used == "5shot"
        else f"the scores are of another kind ({score_title(answers.results)}), so only the order of the variants and the signs can be compared"
    )
    yield Paragraph(
        f"{published.TABLE_8}; {kind}. The data, the model and the length here are others, so the sizes of differences need not agree."
    )
    matched.sort(key=lambda pair: -pair[1].score)
    rows = []
    for variant, row in matched:
        name = variant.point.model
        difference = (
            f"{100 * (ours[name] - ours[answers.baseline]):+.2f}" if name in ours and answers.baseline in ours else "–"
        )
        rows.append((name, row.title, f"{100 * row.score:.2f}", f"{100 * (row.score - base.score):+.2f}", difference))
    yield Table(
        (
            "variant",
            "in the paper",
            "5-shot there, %",
            f"difference to {base.title} there, points",
            f"difference here ({used}), points",
        ),
        rows,
    )
