"""What an experiment costs before it runs, FLOPs and hours of every run; its plan, and its SLURM script: each array
task does one job, on one node.
"""

import math
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.base.files import as_bytes, replacing
from pipeline.base.progress import duration
from pipeline.base.words import counted
from pipeline.cluster.ray_tasks import RunJobs, shared_path
from pipeline.experiment import engine
from pipeline.experiment.engine import Experiment, jobs_of
from pipeline.experiment.table import TO_RUN, Row
from pipeline.process.outputs import hold
from pipeline.settings.commands.study import ExperimentConfig

# What a process costs beside training, in seconds: imports, the first step, evaluation, the last checkpoint.
_SECONDS_OF_A_PROCESS = 20.0
# Share of a matrix product's speed that a training step reaches on a CPU (0.7 for ViT-S/16 in fp32 on an Intel Xeon).
_SHARE_ON_A_CPU = 0.5
# A task's time limit is the estimate times this, because another node may be slower and the estimate is one.
_MARGIN = 2.0
_SCRIPT = """\
#!/bin/bash
# {name}: {runs} runs in {jobs} array tasks. Submit it with: sbatch {file}
# A task that is killed or preempted continues where it was: submit the script again. Tasks that are done end at once.
# When all tasks have ended, this writes the report:
#   {report}
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
    own, at_a_time = engine.place(config)
    if config.cell:
        engine.run_one(experiment, config.cell)
        return None
    specs, rows = experiment.known()
    if not (config.slurm or config.report):
        print(
            "\n".join(plan_table(experiment, rows, estimate(experiment, experiment.config, rows), at_a_time)),
            flush=True,
        )
    if config.slurm:
        experiment.claim(specs)
        write_script(experiment, rows, config.slurm)
    return None if config.plan or config.slurm else engine.run(experiment, run_jobs or own, config.report)


@dataclass(frozen=True)
class CostEstimate:
    """hours: of each run by name, by the clock, alone; empty if the speed is not known. source: of the speed, in
    words.
    """

    hours: dict[str, float]
    source: str


def estimate(experiment: Experiment, config: ExperimentConfig, rows: Mapping[str, Row]) -> CostEstimate:
    """Estimate the hours of every run, by the speed of those that are done.

    Without them, it is the speeds of the models with `minutes`, `tflops` of the settings, or measured here if the runs
    compute on this CPU.
    """
    specs = experiment.specs
    measured: dict[str, list[float]] = {}
    for spec in specs:
        if (row := rows.get(spec.name)) and row.hours and spec.flops:
            measured.setdefault(spec.group, []).append(row.hours / spec.flops)
    if measured:
        per_flop = {group: median(values) for group, values in measured.items()}
        usual = median(per_flop.values())
        hours = {spec.name: spec.flops * per_flop.get(spec.group, usual) for spec in specs}
        return CostEstimate(hours, f"as measured in {counted(sum(map(len, measured.values())), 'run')} of these")
    # How long it takes depends on the model and the device: measured hours include it.
    compiles = any(spec.config.engine.compile for spec in specs)
    without = ", without the time to compile the models (engine.compile)" if compiles else ""
    fixed, devices = _SECONDS_OF_A_PROCESS / 3600, max(1, config.gpus)
    if speeds := experiment.speeds:
        per_image = {
            spec.group: 1e18 * spec.facts["exaflops"] / spec.facts["images_seen"] for spec in specs if spec.facts
        }
        hours = {spec.name: spec.flops / (3600 * speeds[spec.group] * per_image[spec.group]) for spec in specs}
        source = "at the models' speeds"
    elif not all(spec.flops for spec in specs) or not (config.tflops or (config.on == "here" and not config.gpus)):
        return CostEstimate(
            {}, "of unknown speed: set tflops=..., what a device keeps up in training (launch/plan.py predicts it)"
        )
    else:
        rate, source = config.tflops * 1e12 * devices, f"with {devices} x {config.tflops:g} TFLOP/s (tflops)"
        if not config.tflops:
            rate = _SHARE_ON_A_CPU * _speed_of_this_cpu()
            source = (
                f"with {rate / 1e12:.2g} TFLOP/s, {_SHARE_ON_A_CPU:.0%} of what this CPU reaches in a matrix product"
            )
        hours = {spec.name: spec.flops / rate / 3600 for spec in specs}
    return CostEstimate({name: alone + fixed for name, alone in hours.items()}, source + without)


def _speed_of_this_cpu() -> float:
    """FLOP/s of a matrix product on all threads, from that of one: on a busy host, threads that share a product wait
    for each other.
    """
    import torch  # Late: only this measurement needs it.

    from pipeline.monitor.profile import peak_flops

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # This process does not train.
    try:
        return threads * peak_flops(torch.device("cpu"), torch.float32, 0.0)[0]
    finally:
        torch.set_num_threads(threads)


def plan_table(experiment: Experiment, rows: Mapping[str, Row], estimated: CostEstimate, at_a_time: int) -> list[str]:
    """The lines of --plan: every run with its size, length, compute and hours, and the sums."""
    width = max(map(len, rows))
    lines = [
        f"{'run':<{width}}  {'M par.':>7} {'images':>11} {'steps':>9} {'epochs':>7} {'exaFLOPs':>10} {'time':>8}  state"
    ]
    for name, row in rows.items():
        time = duration(3600 * estimated.hours[name]) if name in estimated.hours else "-"
        epochs = row.images_seen / row.data_size if row.data_size else 0
        lines.append(
            f"{name:<{width}}  {row.parameters / 1e6:>7.2f} {row.data_size:>11,} {row.steps:>9,} {epochs:>7.1f} "
            f"{row.exaflops:>10.3g} {time:>8}  {row.state}"
        )
    left = [name for name, row in rows.items() if row.state in TO_RUN]
    done = sum(row.state == "done" for row in rows.values())
    summary = f"{counted(len(rows), 'run')}, {done} of them done; {experiment.flops / 1e18:.3g} exaFLOPs are computed"
    if estimated.hours and left:
        hours = [estimated.hours[name] for name in left]
        alone = max(sum(hours) / at_a_time, *hours)  # They may not divide evenly: never less than the longest.
        summary += f"; those left take {duration(3600 * alone)} {estimated.source}, {at_a_time} at a time"
        gpus = experiment.config.gpus
        summary += f", {sum(hours) * gpus:,.3g} GPU hours" if gpus else ""
    elif left:
        summary += f"; {estimated.source}"
    return [*lines, f"{summary}.", *experiment.notes]


def write_script(experiment: Experiment, rows: Mapping[str, Row], file: str) -> None:
    """Write the script, or print it if file is '-'. It repeats the command line of this process."""
    config, jobs, hours = (
        experiment.config,
        jobs_of(experiment.specs),
        estimate(experiment, experiment.config, rows).hours,
    )
    given = [text for text in sys.argv[1:] if not text.startswith("slurm=")]
    if given == sys.argv[1:]:  # It is in the file of settings.
        given.append("slurm=")
    command = shlex.join([sys.executable, sys.argv[0], *given])
    longest = max(sum(hours.get(spec.name, 0.0) for spec in job) for job in jobs)
    minutes = math.ceil(60 * _MARGIN * longest)
    text = _SCRIPT.format(
        name=config.name,
        runs=len(experiment.specs),
        jobs=len(jobs),
        file=file if file != "-" else "FILE",
        report=f"{command} report=true",
        last=len(jobs) - 1,
        gpus=f"#SBATCH --gpus-per-node={config.gpus}\n" if config.gpus else "",
        cpus=config.threads * max(1, config.gpus),
        time=f"#SBATCH --time={minutes}  # minutes: {_MARGIN:g} x the estimate of the longest task\n"
        if minutes
        else "",
        folder=shlex.quote(str(Path.cwd())),
        names="\n".join(f"  {shlex.quote(job[-1].name)}" for job in jobs),
        command=command,
    )
    if file == "-":
        print(text, end="")
        return
    with replacing(Path(file), mode=0o600) as script:  # The command may hold a password, as in track.uri.
        script.write(as_bytes(text))
    print(f"{file}: {counted(len(jobs), 'array task')}. Submit it with: sbatch {file}")
