"""One run on one page: scores, confused classes and mistakes, warnings, figures, plan and measurement, lineage,
settings, data, code, weights.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.base.metric import kind_of, title_of
from pipeline.base.page import Block, PngImage, Table, render
from pipeline.base.progress import duration
from pipeline.base.trained_on import TRAINED_BY, not_held_out
from pipeline.base.words import counted, si
from pipeline.evaluate import mistakes
from pipeline.experiment.table import TEMPLATES
from pipeline.experiment.vtab_report import score_table
from pipeline.monitor.page_folder import FIGURES, MISTAKES, PAGE
from pipeline.process.outputs import hold, try_output
from pipeline.review.compare import shown, when, write_report
from pipeline.review.curves import draw_run
from pipeline.review.record import RunRecord, best_of, from_folder
from pipeline.review.table import PLACES, row, weights_of
from pipeline.settings import schema
from pipeline.settings.commands.reports import RunReportConfig
from pipeline.settings.run import RunConfig

_TEMPLATE = Path(__file__).parent / "templates" / "run.j2"
# Metrics whose last value is to be known before the scores are trusted.
_COUNTS = {
    "skipped_steps": "steps skipped for a non-finite gradient or a loss spike",
    "loss_spikes": "loss spikes",
    "bad_samples": "training images that could not be read",
    "storage_retries": "storage requests that were tried again",
}


def run(config: RunReportConfig) -> Path:
    """Write the report of `config.run`; returns its HTML file. Raises UserError if the address is not a run."""
    record = from_folder(Path(config.run))
    folder = Path(config.out) if config.out else record.folder / "review"
    try_output("out", folder, holds="report of a run")
    hold(folder)
    score = record.last_score
    title = f"{record.name}: {f'{score.name} {score}' if score else record.outcome}"
    return write_report(folder, page(title, record), ["report", title])


def page(title: str, record: RunRecord) -> dict[str, bytes | str | None]:
    """The files of the report."""
    drawn = {
        file.stem: PngImage(f"figure_{file.name}", file.stem.replace("_", " "), file.read_bytes())
        for file in sorted((record.folder / FIGURES).glob("*.png"))
    }
    of_mistakes, pictures_of_mistakes = list[Block](), dict[str, bytes]()
    folder = record.folder / PAGE / MISTAKES
    if found := mistakes.Mistakes.read(folder):
        of_run, pictures_of_mistakes = found
        of_mistakes = mistakes.blocks(of_run, pictures_of_mistakes, folder, drawn.get("confusion"))
    drawn.pop("curves", None)  # Drawn here.
    pictures = list(drawn.values())
    # An evaluation has one point, at step 0.
    if record.last_step and (curves := draw_run(record)):
        about = "Losses, held-out accuracy, learning rate and speed over the steps"
        pictures.insert(0, PngImage("curves.png", about, curves))
    files = render(
        _TEMPLATE,
        title,
        pictures,
        TEMPLATES,
        record=record,
        of_mistakes=of_mistakes,
        period=[when(seconds) for seconds in record.period],
        problems=list(problems(record)),
        starts=[
            (
                when(start.time),
                f"{start.step:,}",
                ", ".join(sorted(set(start.hosts))),
                start.before or "–",
                start.changed or "–",
            )
            for start in record.starts
        ],
        lineage=lineage(record),
        measured=measured(record),
        scores=list(score_rows(record)),
        sweep_scores=score_table([record.sweep]) if record.sweep else None,
        not_held_out=not_held_out,
        settings=settings(record),
        data=data(record),
        code=code(record),
        weights=weights(record) if record.kind in ("pretrain", "finetune") else None,
    )
    return {**files, **pictures_of_mistakes}


def problems(record: RunRecord) -> Iterator[str]:
    """Warnings about the scores."""
    series = record.series
    for name, what in _COUNTS.items():
        if name in series and (count := series[name].values.max()) > 0:
            yield f"{count:,.0f} {what}"
    for name in ("collapse", "probe_collapse"):
        if name in series:
            steps = series[name].steps
            yield f"{title_of(name)} at {counted(len(steps), 'step')}, first at step {steps[0]:,}"
    unreadable = series.get(f"{record.split}_num_unreadable")
    if unreadable and unreadable.values[-1] > 0:
        treated = "are not scored" if kind_of(record.scored) == "r2" else "count as wrong"
        yield f"{unreadable.values[-1]:,.0f} held-out images could not be read, and {treated}"
    if record.num_damaged:
        yield f"{counted(record.num_damaged, 'damaged line')} of metrics.jsonl ignored"
    if record.outcome != "finished":
        yield f"{record.status}: {record.outcome}"
    if record.revision.endswith("+changes"):
        yield "the code had changes that are in no commit"
    if (excluded := record.parameters.get("excluded", "none")) != "none":
        yield f"samples were excluded from training on purpose: {excluded}"


def lineage(record: RunRecord) -> Table | None:
    """The weights that the run began with, as they were then."""
    if (used := record.origin) is None:
        return None
    known = (used.run or used.path, shown(used.step), used.score or "–", used.sha256, used.run_id or "–")
    return Table(("began with the weights of", "step", "which scored", "SHA-256", "MLflow run"), [known])


def measured(record: RunRecord) -> Table | None:
    """The plan beside what was measured; None for a run without steps."""
    steps, done, batch = record.steps, record.last_step, record.images_per_step
    if not steps:
        return None
    train = record.dataset("training")
    planned, so_far = (1e18 * record.axes(step)["exaflops"] for step in (steps, done))
    # Those of data.path, of which a batch of a mixture holds a share, as the run planned them.
    in_all = float(record.parameters.get("epochs", 0)) or (steps * batch / train.num_samples if train else 0.0)
    memory, waits = record.series.get("peak_memory_gib"), record.median("data_wait")
    rows = [
        ("steps", f"{steps:,}", f"{done:,}"),
        ("epochs", f"{in_all:,.1f}", f"{in_all * done / steps:,.1f}"),
        ("training arithmetic", si(planned, "FLOP"), si(so_far, "FLOP")),
        ("images/s, median", "–", shown(record.median("images_per_second"))),
        ("MFU, median", "–", shown(record.median("mfu"))),
        ("time of training steps", "–", duration(record.training_seconds)),
        ("peak memory of a rank", "–", f"{np.nanmax(memory.values):.2f} GiB" if memory else "–"),
        ("share of time that waits for data, median", "–", "–" if waits is None else f"{waits:.1%}"),
    ]
    return Table(("", "planned", "measured"), rows)


def score_rows(record: RunRecord) -> Iterator[tuple[str, ...]]:
    """Rows of metrics with a direction: those of the held-out split, most telling first, then probes by name."""
    probed = [name for name in record.series if record.metric(name).group == "probe" and record.metric(name).better]
    for name in (*record.held_out, *sorted(probed)):
        best = best_of(record.series[name], record.metric(name))
        scores = [record.score_at(number, name) for number in (-1, best)]
        title = f"probe {name}" if name in probed else scores[0].name
        cells = [cell for score in scores for cell in (str(score), shown(score.step))]
        yield title, *cells, shown(scores[1].num_samples or None)


def settings(record: RunRecord) -> Table:
    """Those that differ from the defaults; an evaluation has the settings of another command."""
    defaults = {} if record.kind == "evaluation" else schema.defaults(RunConfig)
    rows = [
        (name, str(value), "–" if defaults.get(name) in ("", None) else str(defaults[name]))
        for name, value in record.settings.items()
        if name not in PLACES and str(value) != str(defaults.get(name))
    ]
    return Table(("setting", "value", "default"), rows)


def data(record: RunRecord) -> Table:
    rows = []
    for facts in record.datasets:
        trained = f"of images that {facts.notes[TRAINED_BY]} trained on" if TRAINED_BY in facts.notes else ""
        used_for = f"{facts.context} {facts.notes.get('share', '')} {trained}".strip()
        count, classes = shown(facts.num_samples or None), shown(facts.num_classes or None)
        rows.append((used_for, facts.name, facts.split, count, classes, facts.digest or "–", facts.source or "–"))
    return Table(("used for", "data set", "split", "images", "classes", "fingerprint", "where"), rows)


def code(record: RunRecord) -> Table:
    known = row(record.name, record)["Code"]
    return Table(("", "value"), [(name.replace("_", " "), shown(value)) for name, value in known.items() if value])


def weights(record: RunRecord) -> tuple[Table | None, str]:
    """Returns (the checkpoints that the run keeps, how to use the best one); (None, why) if there are none."""
    found, problem = weights_of(record)
    if not found:
        return None, problem
    rows = [(", ".join(one.roles) or "–", f"{one.step:,}", one.sha256, one.path) for one in found]
    chosen = next((one for one in found if "best" in one.roles), found[-1])
    how = f'from pipeline.model import load\nmodel = load("{chosen.path}")'
    return Table(("role", "step", "SHA-256 of model.safetensors", "where"), rows), how
