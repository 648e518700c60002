"""One run on one page: lineage, plan and measurement, scores, curves, warnings, settings, data, code, weights."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.base.errors import UserError
from pipeline.base.page import Block, Code, Heading, Paragraph, PngImage, Table, report
from pipeline.base.progress import duration
from pipeline.base.trained_on import TRAINED_BY
from pipeline.base.words import counted, on_one_line
from pipeline.checkpoint.store import Checkpoints
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.bucket import to_path
from pipeline.experiment import grid
from pipeline.experiment.vtab_report import about_intervals, caveats, origin, score_table
from pipeline.lifecycle.logged_models import logged_models
from pipeline.monitor.export import read_states
from pipeline.monitor.mlflow.state import STATE_FILE
from pipeline.monitor.page_folder import Start
from pipeline.monitor.run_page import PREDICTED_SPEED, TEACHER_TAG, DatasetFacts, ModelFacts
from pipeline.process.committed import checkpoints_of, run_of_checkpoint
from pipeline.process.outputs import hold, try_output
from pipeline.review.budgets import FLOPS, in_units
from pipeline.review.compare import PLACES, REPLACED, code_facts, median_speed, when
from pipeline.review.figures import draw_run
from pipeline.review.reader import from_folder, is_run, read
from pipeline.review.record import RunRecord, Series, as_number, best_of, title_of
from pipeline.settings import changes
from pipeline.settings.commands.reports import RunReportConfig
from pipeline.settings.run import RunConfig

_KINDS = {
    "pretrain": "pre-training",
    "finetune": "fine-tuning",
    "grid": "grid of fine-tunings",
    "vtab": "VTAB-1k sweep",
    "study": "study",
    "data": "job on data",
    "explain": "explanation of a model",
}
_MAX_ANCESTORS = 8
_COUNTS = {
    "skipped_steps": "steps skipped for a non-finite gradient or a loss spike",
    "loss_spikes": "loss spikes",
    "bad_samples": "training images that could not be read",
    "storage_retries": "storage requests that were tried again",
}
# Logged only where there is one.
_COLLAPSES = {"collapse": "the objective's values", "probe_collapse": "the probe's features"}
_SHOWN_PACKAGES = ("torch", "deepspeed", "ray", "mlflow", "numpy", "pyarrow")


def run(config: RunReportConfig) -> Path:
    """Write the report of `config.run`; returns its HTML file. Raises UserError for an address that is no run."""
    record = read(config.run)
    folder = Path(config.out) if config.out else record.folder / "review"
    try_output("out", folder, holds="report of a run")
    hold(folder)
    score = record.last_score
    title = f"{record.name}: {f'{score.name} {score}' if score else record.outcome or record.status}"
    blocks = list(page(record))
    is_replaced = (folder / "report.html").exists()
    write_files(folder, report(title, blocks), mark="report.html")
    print(title)
    print(f"report: {folder / 'report.html'}{REPLACED * is_replaced}")
    return folder / "report.html"


def page(record: RunRecord) -> Iterator[Block]:
    """The blocks of the report."""
    yield from _what_it_is(record)
    yield Heading("Health")
    yield from _health(record)
    if rows := list(lineage(record)):
        yield Heading("Lineage")
        yield Table(("run", "kind", "began with the weights of", "step", "which scored", "SHA-256", "MLflow run"), rows)
    if record.steps or record.last_step:
        yield Heading("Plan and measurement")
        yield _measured(record)
        if _predicted_speed(record):
            yield Paragraph("Planned speed and time are predicted from the GPU's data sheet (docs/plan.md).")
        if plan := record.files.read("plan.txt"):
            yield Code(plan.decode(errors="replace").strip())
    yield from _scores(record)
    yield from _curves(record)
    yield from _figures(record)
    yield from _settings(record)
    yield from _data(record)
    yield Heading("Code and environment")
    yield from _code(record)
    if record.kind in ("pretrain", "finetune"):
        yield Heading("Weights")
        yield from _weights(record)


# ---------------------------------------------------------------------- what it is
def _what_it_is(record: RunRecord) -> Iterator[Block]:
    train = record.dataset("training")
    size = f" at {size} px" if (size := record.settings.get("model.image_size")) else ""
    of_model = f" of {record.model}{size}" if record.model else ""
    on = f" on {train.name}" if train else ""
    parts = [f"{counted(train.num_samples, 'image')}"] if train and train.num_samples else []
    parts += [f"{counted(train.num_classes, 'class')}"] if train and train.num_classes else []
    parts += [f"fingerprint {train.digest}"] if train and train.digest else []
    described = f" ({', '.join(parts)})" if parts else ""
    used = record.origin
    weights = f"{used.path} ({f'{used.run}, ' if used.run else ''}{used.details})" if used else ""
    origin = f", from the weights in {weights}" if weights else ""
    origin += f", taught by {teacher}" if (teacher := record.tags.get(TEACHER_TAG)) else ""
    yield Paragraph(f"{_sentence(_KINDS.get(record.kind, record.kind))}{of_model}{on}{described}{origin}.")
    begin, end = record.period
    period = f", recorded from {when(begin)} to {when(end)} UTC" if end else ""
    places = [f"run folder {record.folder.resolve()}", f"MLflow run {record.run_id}" if record.run_id else ""]
    yield Paragraph(
        f"{_sentence((record.outcome or record.status).rstrip('.'))}{period}. {_sentence('; '.join(filter(None, places)))}."
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _measured(record: RunRecord) -> Table:
    batch, flops = record.images_per_step, record.flops_per_image
    train = record.dataset("training")
    speed, _ = median_speed(record)
    mfu = _median(record.metrics.get("mfu"))
    seconds = record.training_seconds
    planned_speed = _predicted_speed(record)
    planned_mfu = mfu * planned_speed / speed if speed else 0.0
    steps, done = record.steps, record.last_step
    rows: list[tuple[str, ...]] = [
        ("steps", f"{steps:,}" if steps else "–", f"{done:,}"),
        ("images", f"{steps * batch:,}" if steps else "–", f"{done * batch:,}"),
    ]
    # Those of data.path, of which a batch of a mixture holds a share, as the run planned them.
    in_all = as_number(record.parameters.get("epochs", ""))
    a_step = in_all / steps if in_all and steps else batch / train.num_samples if train and train.num_samples else 0.0
    if a_step:
        rows.append(("epochs", *(f"{count * a_step:,.1f}" if count else "–" for count in (steps, done))))
    if flops:
        planned, used = (in_units(record.flops_until(count), FLOPS) if count else "–" for count in (steps, done))
        rows.append(("training FLOPs", planned, used))
    of_plan = f"{planned_speed:,.1f}" if planned_speed else "–"
    rows.append(("images/s, median", of_plan, f"{speed:,.1f}" if speed else "–"))
    rows.append(
        (
            "MFU, median",
            f"{100 * planned_mfu:.0f} %" if planned_mfu else "–",
            f"{100 * mfu:{'.1f' if mfu >= 0.001 else '.2g'}} %" if mfu else "–",
        )
    )
    planned_time = duration(steps * batch / planned_speed) if planned_speed and steps else "–"
    rows.append(("time of training steps", planned_time, duration(seconds) if seconds else "–"))
    if record.ranks:
        device = record.tags.get("device", "")
        rows.append(("ranks", f"{record.ranks}", f"{record.ranks}{f' ({device})' if device else ''}"))
    if memory := record.metrics.get("peak_memory_gib"):
        rows.append(("peak memory of a rank", "–", f"{np.nanmax(memory.values):.2f} GiB"))
    if waits := _median(record.metrics.get("data_wait")):
        rows.append(("share of time that waits for data, median", "–", f"{100 * waits:.1f} %"))
    return Table(("", "planned", "measured"), rows)


def _predicted_speed(record: RunRecord) -> float:
    """Images/s of the whole run as predicted at its start; 0 for a run on CPUs or of an earlier version."""
    return max(0.0, as_number(record.parameters.get(PREDICTED_SPEED)))


def _median(series: Series | None) -> float:
    finite = series.values[np.isfinite(series.values)] if series else np.empty(0)
    return float(np.median(finite)) if len(finite) else 0.0


def lineage(record: RunRecord) -> Iterator[tuple[str, ...]]:
    """A row for the run, and for each of the runs before it whose folder is here: which weights it began with, as they were then."""
    for _ in range(_MAX_ANCESTORS):
        if (used := record.origin) is None:
            return
        step = "–" if used.step is None else f"{used.step:,}"
        yield (
            record.name,
            _KINDS.get(record.kind, record.kind),
            used.run or used.path,
            step,
            used.score or "–",
            used.sha256,
            used.run_id or "–",
        )
        path = Path(used.path).absolute()  # The checkpoint itself may have been removed since.
        around = next((folder for folder in path.parents[:4] if is_run(folder)), None) or run_of_checkpoint(path)
        try:
            record = from_folder(around) if around else replace(record, origin=None)
        except (UserError, OSError):  # A damaged run of the past is not this run's problem.
            return


# ---------------------------------------------------------------------- scores
def _scores(record: RunRecord) -> Iterator[Block]:
    if record.kind == "grid" and record.results:
        yield Heading("Scores")
        yield from grid.page(record.results)
        return
    if record.sweep:
        yield Heading("Scores")
        for line in caveats(record.sweep):
            yield Paragraph(line)
        yield score_table([record.sweep])
        yield Paragraph(f"Top-1 accuracy in per cent. {about_intervals([record.sweep])}")
        yield from origin(record.sweep)
        return
    if rows := list(_score_rows(record)):
        yield Heading("Scores")
        yield Table(("score", "last", "at step", "best", "at step", "images"), rows)
        last = record.last_score
        in_groups = last and last.effective < last.num_samples
        over = "the groups of these test images" if in_groups else "these test images"
        brackets = f"Brackets are 95 % intervals (Wilson's): the noise of {over}, not that of another seed. "
        yield Paragraph(
            brackets * any("[" in row[1] for row in rows)
            + "The best of several evaluations is chosen on the images that score it, so it is a little too good."
        )
    elif not record.images_per_step and record.metrics:
        yield Heading("Numbers")
        yield Table(
            ("", "value"), [(name, f"{series.values[-1]:,.6g}") for name, series in sorted(record.metrics.items())]
        )


def _score_rows(record: RunRecord) -> Iterator[tuple[str, ...]]:
    """Of what has a direction: the held-out split's, the most telling first, then probes' by name."""
    titles = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", "color_accuracy": "accuracy of patch colours"}
    probed = sorted(name for name in record.metrics if record.metric(name).group == "probe")
    for name in (*record.held_out, *(name for name in probed if record.metric(name).better)):
        series, own_name = record.metrics[name], name.removeprefix(f"{record.split}_")
        shown, count = (
            f"{titles.get(own_name, title_of(own_name))}, split {record.split}",
            record.num_tested(name, int(series.steps[-1])),
        )
        if name in probed:
            shown, count = f"probe {name}", count if name in record.probes or record.kind == "evaluation" else 0
        cells = []
        for number in (len(series) - 1, best_of(series, record.metric(name))):
            cells += [str(record.score_at(number, name)), f"{series.steps[number]:,}"]
        yield (shown, *cells, f"{count:,}" if count else "–")


# ---------------------------------------------------------------------- curves and figures
def _curves(record: RunRecord) -> Iterator[Block]:
    if record.last_step and (content := draw_run(record)):  # An evaluation has one point, at step 0.
        yield Heading("Curves")
        yield PngImage("curves.png", "Losses, held-out accuracy, learning rate and speed over the steps", content)


def _figures(record: RunRecord) -> Iterator[Block]:
    names = [name for name in record.files.figures() if Path(name).name != "curves.png"]  # Drawn above.
    if not names:
        return
    yield Heading("Figures")
    for name in names:
        content = record.files.read(name)
        if content is not None:
            title = Path(name).stem.replace("_", " ")
            yield Paragraph(_sentence(title) + ":")
            yield PngImage(f"figure_{Path(name).name}", title, content)


# ---------------------------------------------------------------------- health
def _health(record: RunRecord) -> Iterator[Block]:
    problems = [
        f"{int(count):,} {what}"
        for name, what in _COUNTS.items()
        if (series := record.metrics.get(name)) and (count := series.values.max()) > 0
    ]
    problems += [
        f"{what} showed a collapse at {counted(len(series), 'step')}, first at step {series.steps[0]:,}"
        for name, what in _COLLAPSES.items()
        if (series := record.metrics.get(name)) and len(series)
    ]
    unreadable = record.metrics.get(f"{record.split}_num_unreadable")
    if unreadable and unreadable.values[-1] > 0:
        problems.append(
            f"{counted(int(unreadable.values[-1]), 'held-out image')} that could not be read, counted as wrong"
        )
    losses = record.metrics.get("loss")
    if losses and (broken := int(np.count_nonzero(~np.isfinite(losses.values)))):
        problems.append(f"{counted(broken, 'log line')} with a loss that is not finite")
    problems += record.problems
    if record.status not in ("finished", ""):
        problems.append(f"the run is not finished: {record.outcome or record.status}")
    if record.status == "finished" and record.outcome.startswith("finished, but"):
        problems.append(record.outcome)
    if record.steps and record.status == "finished" and record.last_step < record.steps:
        problems.append(f"only {record.last_step:,} of {counted(record.steps, 'planned step')} are recorded")
    if record.revision.endswith("+changes"):
        problems.append("the code had changes that are in no commit")
    problems += [
        f"from step {start.step:,} on, other settings: {start.changed[:500]}"
        for start in record.starts
        if start.changed
    ]
    if (excluded := record.parameters.get("excluded", "none")) not in ("none", ""):
        problems.append(f"samples were excluded from training on purpose: {excluded}")
    if problems:
        yield Table(("to know before trusting the scores",), [(_sentence(problem),) for problem in problems])
    elif record.images_per_step:
        yield Paragraph("No step was skipped, no image was unreadable, and the run ended as planned.")
    else:
        yield Paragraph("Nothing went wrong that is recorded.")
    if len(record.starts) > 1:
        yield Paragraph(f"Started {counted(len(record.starts), 'time')}:")
        yield Table(
            ("start", "from step", "hosts", "how the start before ended", "settings changed"),
            [_start_row(start) for start in record.starts],
        )


def _start_row(start: Start) -> tuple[str, ...]:
    hosts = sorted(set(start.hosts))
    named = f"{len(hosts)}: {', '.join(hosts)}"[:200] if hosts else "–"
    return when(start.time), f"{start.step:,}", named, start.before[:500] or "–", start.changed[:500] or "–"


# ---------------------------------------------------------------------- settings, data, code
def _settings(record: RunRecord) -> Iterator[Block]:
    if not record.settings:
        return
    defaults = changes.defaults(RunConfig)
    rows = [
        (name, str(value), str(defaults[name]) if defaults.get(name) not in ("", None) else "–")
        for name, value in record.settings.items()
        if name not in PLACES and str(value) != str(defaults.get(name))
    ]
    if record.kind == "evaluation":
        yield Heading("Settings")
        yield Table(("setting", "value"), [(name, value) for name, value, _ in rows])
        return
    yield Heading("Settings that differ from the defaults")
    yield Table(("setting", "value", "default"), rows)
    kept = "All settings are in config.yaml, which --config accepts." if record.has_all_settings else ""
    yield Paragraph(f"model.* is the architecture as built. {kept}".strip())


def _data(record: RunRecord) -> Iterator[Block]:
    if not record.datasets:
        return
    yield Heading("Data")
    rows = [
        (
            f"{facts.context} {facts.notes.get('share', '')}{_trained_on(facts)}".strip(),
            facts.name,
            facts.split,
            f"{facts.num_samples:,}" if facts.num_samples else "–",
            f"{facts.num_classes:,}" if facts.num_classes else "–",
            facts.digest or "–",
            facts.source or "–",
        )
        for facts in record.datasets
    ]
    yield Table(("used for", "data set", "split", "images", "classes", "fingerprint", "where"), rows)


def _trained_on(facts: DatasetFacts) -> str:
    runs = facts.notes.get(TRAINED_BY)
    return f"of images that {runs} trained on" if runs else ""


def _code(record: RunRecord) -> Iterator[Block]:
    facts = code_facts(record)
    packages = (record.files.read("environment.txt") or b"").decode(errors="replace").splitlines()
    shown = [line for line in packages if line.partition("==")[0].lower() in _SHOWN_PACKAGES]
    rows = [(name, value) for name, value in facts.items() if value != "–" and name != "command"]
    if shown:
        rows.append((f"packages, of {len(packages):,} in environment.txt", ", ".join(shown)))
    yield Table(("", "value"), rows) if rows else Paragraph("Not recorded by this run.")
    if command := record.tags.get("command"):
        yield Code(command)


# ---------------------------------------------------------------------- weights
def _weights(record: RunRecord) -> Iterator[Block]:
    found, problem = weights_of(record)
    if problem:
        yield Paragraph(problem)
    if not found:
        return
    rows = [
        (", ".join(weights.roles) or "–", f"{weights.step:,}", weights.sha256 or "–", weights.path, address or "–")
        for weights, address in found
    ]
    yield Table(("role", "step", "SHA-256 of model.safetensors", "where", "in MLflow"), rows)
    chosen = next((weights for weights, _ in found if "best" in weights.roles), found[-1][0])
    words = [f"weights={chosen.path}"]
    if held_out := record.dataset("evaluation"):
        # "dev" is a part of the training split, of which that command knows nothing.
        split = str(record.settings.get("data.eval_split") or "") if held_out.split == "dev" else held_out.split
        words += [f"data={held_out.source}", *([f"split={split}"] if split else [])]
    yield Code(
        f"python launch/evaluate.py {shlex.join(words)}\n\n"
        f'from pipeline.model import load\nmodel = load("{chosen.path}")'
    )


def weights_of(record: RunRecord) -> tuple[list[tuple[ModelFacts, str]], str]:
    """Returns (best, last and kept checkpoints of the run, oldest first, with their address in MLflow or ""; why there are none)."""
    states, _ = read_states(record.folder / STATE_FILE)
    sent = {sha256: model.model_id for state in states.values() for sha256, model in state.models.items()}
    try:
        folder = to_path(str(checkpoints_of(record.folder.resolve())))
        found = [
            (model, f"models:/{sent[model.sha256]}" if model.sha256 in sent else "")
            for model in logged_models(Checkpoints(folder), ended=True)
        ]
    except (ValueError, OSError) as error:  # A path with a NUL is a ValueError.
        return [], f"The checkpoints cannot be read: {on_one_line(error)[:300]}"
    return found, "" if found else f"There is no checkpoint in {folder}."
