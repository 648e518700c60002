"""What an experiment costs before it runs, FLOPs and hours of every run, and its plan."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.base.progress import duration
from pipeline.base.words import aligned, counted
from pipeline.cluster.ray_tasks import RunJobs, shared_path
from pipeline.experiment import engine
from pipeline.experiment.engine import Experiment
from pipeline.experiment.table import TO_RUN, Row
from pipeline.process.outputs import hold

# What a process costs beside training, in seconds: imports, the first step, evaluation, the last checkpoint.
_SECONDS_OF_A_PROCESS = 20.0


def start(make: Callable[[Any], Experiment], config: Any, run_jobs: RunJobs | None) -> Any:
    """Do what the settings of a study or a grid ask for: a plan, one run, or all. Returns as `engine.run`,
    else None.

    run_jobs: where runs are done; by default as config.on says.
    """
    folder = Path(str(shared_path("out", config.out))) / config.name
    if not (config.plan or config.cell):
        hold(folder)
    experiment = make(config)
    run_jobs = run_jobs or engine.place(config)
    if config.cell:
        engine.run_one(experiment, config.cell)
        return None
    _, rows = experiment.known()
    hours = hours_of(experiment, rows)
    if not config.report:
        print("\n".join(plan_lines(experiment, rows, hours)), flush=True)
    return None if config.plan else engine.run(experiment, run_jobs, config.report)


def hours_of(experiment: Experiment, rows: Mapping[str, Row]) -> dict[str, float]:
    """Hours of every run by the clock, alone: by the speed of those that are done, else by `tflops` of the settings; {}
    without either.
    """
    config, specs = experiment.config, experiment.specs
    measured: dict[str, list[float]] = {}
    for spec in specs:
        if (row := rows.get(spec.name)) and row.hours and spec.flops:
            measured.setdefault(spec.group, []).append(row.hours / spec.flops)
    if measured:
        per_flop = {group: median(values) for group, values in measured.items()}
        usual = median(per_flop.values())
        return {spec.name: spec.flops * per_flop.get(spec.group, usual) for spec in specs}
    rate = config.tflops * 1e12 * max(1, config.gpus)
    if not rate or not experiment.flops:
        return {}
    return {spec.name: (spec.flops / rate + _SECONDS_OF_A_PROCESS) / 3600 for spec in specs}


def plan_lines(experiment: Experiment, rows: Mapping[str, Row], hours: Mapping[str, float]) -> list[str]:
    """Lines of the plan: all runs with their size, length and compute, "-" where unknown; the sums; and notes."""
    table: list[tuple[str, ...]] = [("run", "images", "steps", "exaFLOPs", "state")]
    for name, row in rows.items():
        numbers = {",": row.data_size, ",d": row.steps, ".3g": row.exaflops}
        table.append((name, *(format(value, look) if value else "-" for look, value in numbers.items()), row.state))
    left = [hours[name] for name, row in rows.items() if row.state in TO_RUN and name in hours]
    done = sum(row.state == "done" for row in rows.values())
    summary = f"{counted(len(rows), 'run')}, {done} of them done; {experiment.flops / 1e18:.3g} exaFLOPs are computed"
    if left:
        summary += f"; those left take {duration(3600 * sum(left))}, one after the other"
        gpus = experiment.config.gpus
        summary += f", {sum(left) * gpus:,.3g} GPU hours" if gpus else ""
    return [*aligned(table, 1), f"{summary}.", *experiment.notes]
