"""What an experiment costs before it runs, FLOPs and hours of every run, and its plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    own, at_a_time = engine.place(config)
    if config.cell:
        engine.run_one(experiment, config.cell)
        return None
    _, rows = experiment.known()
    cost = estimate(
        experiment, rows, f"{at_a_time} at a time on {counted(config.gpus, 'GPU') if config.gpus else 'CPUs'}"
    )
    if not config.report:
        runs, summary = plan_lines(experiment, rows, cost, at_a_time)
        print("\n".join([*runs, *summary]), flush=True)
    return None if config.plan else engine.run(experiment, run_jobs or own, config.report)


@dataclass(frozen=True)
class CostEstimate:
    """hours: of each run by name, by the clock, alone; empty if the speed is not known. source: of the speed, in
    words.
    """

    hours: dict[str, float]
    source: str


def estimate(experiment: Experiment, rows: Mapping[str, Row], where: str = "here") -> CostEstimate:
    """Estimate the hours of every run, by the speed of those that are done. where: they train, in words.

    Without them, it is the speeds of the models with `minutes`, or `tflops` of the settings.
    """
    config, specs = experiment.config, experiment.specs
    measured: dict[str, list[float]] = {}
    for spec in specs:
        if (row := rows.get(spec.name)) and row.hours and spec.flops:
            measured.setdefault(spec.group, []).append(row.hours / spec.flops)
    if measured:
        per_flop = {group: median(values) for group, values in measured.items()}
        usual = median(per_flop.values())
        hours = {spec.name: spec.flops * per_flop.get(spec.group, usual) for spec in specs}
        num_measured = counted(sum(map(len, measured.values())), "run")
        return CostEstimate(hours, f"as measured in {num_measured} of these, {where}")
    rate = config.tflops * 1e12 * max(1, config.gpus)
    source = f"with {config.tflops:g} TFLOP/s (tflops) a device" if rate else "at the models' speeds"
    rates = [experiment.rates.get(spec.group, rate) for spec in specs]
    if not all(rates) or not all(spec.flops for spec in specs):
        return CostEstimate(
            {},
            f"{where}, at a speed that is known when the first has ended, or by tflops=..., what a device keeps up"
            " (launch/plan.py predicts it)",
        )
    if any(spec.config.engine.compile for spec in specs):  # Measured hours include it.
        source += ", without the time to compile the models (engine.compile)"
    seconds = [spec.flops / rate + _SECONDS_OF_A_PROCESS for spec, rate in zip(specs, rates, strict=True)]
    hours = {spec.name: one / 3600 for spec, one in zip(specs, seconds, strict=True)}
    return CostEstimate(hours, f"{source}, {where}")


def plan_lines(
    experiment: Experiment, rows: Mapping[str, Row], cost: CostEstimate, at_a_time: int
) -> tuple[list[str], list[str]]:
    """Lines of the plan: all runs with their size, length, compute and hours, "-" where unknown; and the sums."""
    table: list[tuple[str, ...]] = [("run", "M par.", "images", "steps", "epochs", "exaFLOPs", "time", "state")]
    for name, row in rows.items():
        numbers = {
            ".2f": row.parameters / 1e6,
            ",": row.data_size,
            ",d": row.steps,
            ".1f": row.images_seen / (row.data_size or 1),
            ".3g": row.exaflops,
        }
        shown = [format(value, look) if value else "-" for look, value in numbers.items()]
        hours = cost.hours.get(name)
        table.append((name, *shown, duration(3600 * hours) if hours else "-", row.state))
    left = [name for name, row in rows.items() if row.state in TO_RUN]
    done = sum(row.state == "done" for row in rows.values())
    summary = f"{counted(len(rows), 'run')}, {done} of them done; {experiment.flops / 1e18:.3g} exaFLOPs are computed"
    if cost.hours and left:
        hours_left = [cost.hours[name] for name in left]
        alone = max(sum(hours_left) / at_a_time, *hours_left)  # They may not divide evenly.
        summary += f"; those left take {duration(3600 * alone)} {cost.source}"
        gpus = experiment.config.gpus
        summary += f", {sum(hours_left) * gpus:,.3g} GPU hours" if gpus else ""
    elif left:
        summary += f"; those left train {cost.source}"
    return aligned(table, 1), [f"{summary}.", *experiment.notes]
