"""A SLURM array script of a study: each array task runs one job of the study, on one node."""

import math
import shlex
import sys
from pathlib import Path

from pipeline.base.files import as_bytes, replacing
from pipeline.base.words import counted
from pipeline.study.running.cells import Study
from pipeline.study.running.cost import CostEstimate

# A task's time limit is the estimate times this, because another node may be slower and the estimate is one.
_MARGIN = 2.0
_SCRIPT = """\
#!/bin/bash
# The study {name}: {cells} cells in {jobs} array tasks. Written by launch/study.py; submit it with: sbatch {file}
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


def write_script(study: Study, estimated: CostEstimate, file: str) -> None:
    """Write the script, or print it if file is '-'. It repeats the command line of this process."""
    config, jobs = study.config, study.jobs
    given = [text for text in sys.argv[1:] if not text.startswith("slurm=")]
    if given == sys.argv[1:]:  # It is in the file of settings.
        given.append("slurm=")
    command = shlex.join([sys.executable, sys.argv[0], *given])
    longest = (
        max((sum(estimated.hours[cell.name] for cell in job) for job in jobs), default=0.0) if estimated.hours else 0.0
    )
    minutes = math.ceil(60 * _MARGIN * longest)
    text = _SCRIPT.format(
        name=config.name,
        cells=len(study.cells),
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
    else:
        with replacing(Path(file), mode=0o600) as script:  # The command may hold a password, as in track.uri.
            script.write(as_bytes(text))
        print(f"{file}: {counted(len(jobs), 'array task')}. Submit it with: sbatch {file}")
