"""Runs a study: cells that are not done, cheapest first, then the report.

    study.json     what each cell is (cells.py). A folder holds one study.
    CELL/          run folder of a cell; CELL-NAME/ of its fine-tuning; *-trunk-*/ of steps that cells share
    output/        what the commands of each cell printed
    notes/         the time of each cell, and why its last try failed
    progress.json  while it runs
    results.json   what is known of every cell (results.py), with report.md, report.html, results.csv and figures

Where cells run is decided by the caller, which passes a `RunJobs`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.lifecycle.run_folder import RESUME
from pipeline.ray_tasks import LostError, RunJobs, run_here
from pipeline.settings.commands.study import StudyConfig
from pipeline.study.results import TO_RUN, State, StudyResults, keep_earlier, read_results, write_results
from pipeline.study.running.cell_run import Ends, StoppedError, StudyJob, result_of, run_job
from pipeline.study.running.cells import Study, open_study, scored_on
from pipeline.study.running.cost import estimate, plan_table
from pipeline.study.running.slurm import write_script
from pipeline.transfer.sweep_progress import SweepProgress

if TYPE_CHECKING:  # Not imported without MLflow.
    from pipeline.study.running.study_page import StudyPage

# Least time between two reports of an unfinished study, each of which draws figures.
_REPORT_SECONDS = 60.0


def run(
    config: StudyConfig,
    run_jobs: RunJobs = run_here,
    at_a_time: int = 1,
    show: Callable[[Study], AbstractContextManager["StudyPage"] | None] = lambda study: None,
) -> StudyResults | None:
    """Run a study in its folder, locked by the caller, and write its report. Returns None if only a plan or a script was asked for.

    at_a_time: number of cells that run together, for the estimate. show: makes the MLflow page, or None. Raises UserError for a study
    that cannot run, and at the end if a cell failed; the report is written then. Exits with code 75 when a run was asked to stop.
    """
    study = open_study(config)
    ends: dict[str, tuple[State, str]] = {}
    results = read_cells(study, ends)
    if not config.plan:
        study.claim()
    if not (config.slurm or config.cell or config.report):
        print("\n".join(plan_table(study, estimate(study, results.cells), results.cells, at_a_time)), flush=True)
    if config.plan:
        return None
    if config.slurm:
        write_script(study, estimate(study, results.cells), config.slurm)
        return None
    if config.cell:
        _run_one(study, config.cell)
        return None
    for cell in results.cells:
        if cell.state == "damaged":
            print(f"{cell.name}: {cell.reason}{'' if config.report else ' It runs again.'}", flush=True)
    with show(study) or nullcontext() as page:
        if not config.report:
            _run_cells(study, ends, run_jobs, page)
        results, answer = _report(study, ends, page)
    print(f"{answer}\nreport: {study.folder / 'report.md'}, report.html", flush=True)
    if failed := [cell for cell in read_cells(study, ends).cells if cell.state == "failed"]:
        raise UserError(
            f"{len(failed)} of {counted(len(results.cells), 'cell')} failed, such as {failed[0].name}: {failed[0].reason} The same command tries "
            "them again; the report has all others."
        )
    return results


def _report(study: Study, ends: Ends, page: "StudyPage | None") -> tuple[StudyResults, str]:
    """Write results.json and the report of what is done by now. Returns (results, the answer as Markdown)."""
    from pipeline.study.report import write_report  # Late: Matplotlib.

    results = keep_earlier(read_cells(study, ends), _earlier(study.folder))
    write_results(results, study.folder)
    answer, files = write_report(results, study.folder)
    if page:
        page.reported(results, answer, files)
    return results, answer


def _earlier(folder: Path) -> StudyResults | None:
    """The results of the last report, None if there are none. A damaged file is said, and written anew."""
    try:
        return read_results(folder)
    except FileNotFoundError:
        return None
    except UserError as error:
        print(f"{error} It is written anew.", flush=True)
        return None


def read_cells(study: Study, ends: Ends) -> StudyResults:
    """What is known of all cells, in the order of the settings. ends: as of `result_of`."""
    models = [model.name for model in study.config.models]
    cells = sorted(study.cells, key=lambda cell: (models.index(cell.model.name), cell.data_size, cell.steps, cell.seed))
    return StudyResults(
        study.config.name,
        study.config.question,
        study.config.score,
        str(study.dataset.path),
        study.dataset.fingerprint,
        scored_on(study),
        [result_of(study, cell, ends) for cell in cells],
        study.notes,
    )


def names_to_run(results: StudyResults) -> set[str]:
    """Names of the cells that a start runs."""
    return {cell.name for cell in results.cells if cell.state in TO_RUN}


def _run_one(study: Study, name: str) -> None:
    """Run a cell, as a task of a SLURM array does. Its shorter lengths come first if they share its steps."""
    try:
        for cell, reason in run_job(StudyJob(study.job_of(name), study.config, study.folder)).items():
            print(f"{cell}: {reason}", flush=True)
    except LostError as error:
        raise UserError(f"{error} The same command continues it.") from None
    except StoppedError as stopped:
        _exit_to_resume(stopped)


def _run_cells(study: Study, ends: dict[str, tuple[State, str]], run_jobs: RunJobs, page: "StudyPage | None") -> None:
    """Run what is not done. ends: gets how cells ended that failed, or diverged before they had a run."""
    results = read_cells(study, ends)
    todo = names_to_run(results)
    jobs = [job for job in study.jobs if any(cell.name in todo for cell in job)]
    of_model = {cell.name: cell.model.name for cell in study.cells}
    next_report = time.monotonic()

    def to_run() -> Iterator[StudyJob]:
        for cells in jobs:
            track = page.tracking(cells[0].run.config.track) if page else None
            yield StudyJob(cells, study.config, study.folder, track)

    def fail(index: int, reason: str) -> None:
        for cell in jobs[index]:
            if result_of(study, cell, {}).state in TO_RUN:
                ends[cell.name] = "failed", reason
                progress.gave_up(cell.model.name, cell.name, reason)

    done = [of_model[cell.name] for cell in results.cells if cell.name not in todo]
    with SweepProgress(list(of_model.values()), done, study.folder) as progress:
        try:
            for index, diverged in run_jobs(run_job, to_run(), progress.retried, fail):
                ends |= {name: ("diverged", reason) for name, reason in diverged.items()}
                for cell in jobs[index]:
                    if cell.name in todo:
                        result = result_of(study, cell, ends)
                        if result.state == "done" and study.config.score in result.scores:
                            line = f"{cell.name}: {study.config.score} {result.scores[study.config.score]:.2%}"
                            progress.ended(cell.model.name, line, 3600 * (result.hours or 0.0))
                        else:
                            progress.gave_up(cell.model.name, cell.name, result.reason or "it has no score")
                if time.monotonic() >= next_report:
                    _report(study, ends, page)
                    next_report = time.monotonic() + _REPORT_SECONDS
        except StoppedError as stopped:
            _exit_to_resume(stopped)


def _exit_to_resume(stopped: StoppedError) -> None:
    print(f"{stopped}: the same command continues (exit code {RESUME})", file=sys.stderr, flush=True)
    sys.exit(RESUME)
