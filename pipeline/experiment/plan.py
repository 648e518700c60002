"""What an experiment costs before it runs, FLOPs and hours of every run; its plan, and its SLURM script: each array
task does one job, on one node.
"""

import math
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.base.files import as_bytes, replacing
from pipeline.base.progress import duration
from pipeline.base.words import aligned, counted
from pipeline.cluster.ray_tasks import RunJobs, shared_path
from pipeline.experiment import engine
from pipeline.experiment.engine import Experiment, jobs_of
from pipeline.experiment.table import TO_RUN, Row
from pipeline.process.outputs import hold

# What a process costs beside training, in seconds: imports, the first step, evaluation, the last checkpoint.
_SECONDS_OF_A_PROCESS = 20.0
# A task's time limit is the estimate times this, because another node may be slower and the estimate is one.
_MARGIN = 2.0
_SCRIPT = """\
#!/bin/bash
# {name}: {runs} runs in {jobs} array tasks. Submit it with: sbatch {file}
# A task that is killed or preempted continues where it was: submit the script again. Tasks that are done end at once.
# When all tasks have ended, this writes the report:
#   {command} report=true
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks=1
{gpus}#SBATCH --cpus-per-task={cpus}
{time}#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%A_%a.txt
set -u
cd {folder} || exit
JOBS=(
{names}
)
exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" {command} cell="${{JOBS[$SLURM_ARRAY_TASK_ID]}}"
"""


def start(make: Callable[[Any], Experiment], config: Any, run_jobs: RunJobs | None) -> Any:
    """Do what the settings of a study or a grid ask for: a plan, a script, one run, or all. Returns as `engine.run`,
    else None.

    run_jobs: where runs are done; by default as config.on says.
    """
    folder = Path(str(shared_path("out", config.out))) / config.name
    if not (config.plan or config.cell or config.slurm):
        hold(folder)
    experiment = make(config)
    run_jobs = run_jobs or engine.place(config)
    if config.cell:
        engine.run_one(experiment, config.cell)
        return None
    specs, rows = experiment.known()
    hours = hours_of(experiment, rows)
    if not (config.slurm or config.report):
        print("\n".join(plan_lines(experiment, rows, hours)), flush=True)
    if config.slurm:
        experiment.claim(specs)
        write_script(experiment, hours, config.slurm)
    return None if config.plan or config.slurm else engine.run(experiment, run_jobs, config.report)


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


def write_script(experiment: Experiment, hours: Mapping[str, float], file: str) -> None:
    """Write the script. It repeats the command line of this process."""
    config, jobs = experiment.config, jobs_of(experiment.specs)
    given = [text for text in sys.argv if not text.startswith("slurm=")]
    command = shlex.join([sys.executable, *given, "slurm="])  # It may be in the file of settings.
    longest = max(sum(hours.get(spec.name, 0.0) for spec in job) for job in jobs)
    minutes = math.ceil(60 * _MARGIN * longest)
    text = _SCRIPT.format(
        name=config.name,
        runs=len(experiment.specs),
        jobs=len(jobs),
        file=file,
        last=len(jobs) - 1,
        gpus=f"#SBATCH --gpus-per-node={config.gpus}\n" if config.gpus else "",
        cpus=config.threads * max(1, config.gpus),
        time=f"#SBATCH --time={minutes}  # minutes: {_MARGIN:g} x the longest task's estimate\n" if minutes else "",
        folder=shlex.quote(str(Path.cwd())),
        names="\n".join(f"  {shlex.quote(job[-1].name)}" for job in jobs),
        command=command,
    )
    with replacing(Path(file), mode=0o600) as script:  # The command may hold a password, as in track.uri.
        script.write(as_bytes(text))
    print(f"{file}: {counted(len(jobs), 'array task')}. Submit it with: sbatch {file}")
