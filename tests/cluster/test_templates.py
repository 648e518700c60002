"""The templates for SLURM and Kubernetes, run with stand-ins for the cluster's commands: who is started, stopped, tried
again.
"""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from ranks import ROOT

from pipeline.cluster.status_files import RESUME
from pipeline.settings.command import read_settings
from pipeline.settings.run import RunConfig

# Says how it was started, trains until the stop file is there (or not at all), and leaves the code and reason that it
# is told.
_TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$SAID"
for word in "$@"; do case $word in out=*) out=${word#out=};; name=*) name=${word#name=};; esac; done
mkdir -p "$out/$name"
while [ -n "$TRAINS" ] && [ ! -e "$out/$name/stop" ]; do sleep 0.05; done
[ -z "$CODE" ] || echo "{\\"step\\": 3, \\"code\\": $CODE, \\"reason\\": \\"$REASON\\"}" > "$out/$name/status.json"
exit 1
"""
_SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do echo "$1" >> "$HOME/srun"; shift; done
SLURM_NODEID=0 exec "$@"
"""
_SCONTROL = """#!/bin/bash
case $1 in
  show) printf 'node1\\nnode2\\n';;
  requeue) echo "$2" >> "$REQUEUED";;
esac
"""


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Has the repository in `vit`, and the cluster's commands in `bin`."""
    for path, text in (
        ("vit/.venv/bin/torchrun", _TORCHRUN),
        ("bin/torchrun", _TORCHRUN),
        ("bin/srun", _SRUN),
        ("bin/scontrol", _SCONTROL),
    ):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return tmp_path


def run(home: Path, script: str, code: str, stop_by: signal.Signals | str | None = None, **more: str) -> int:
    """The exit code of a shell script of which the run ends with `code`, after the signal if there is one.

    stop_by: a text is the reason for which the run ends without a signal to the script.
    """
    asked = isinstance(stop_by, signal.Signals)
    reason = "the stop file" if asked else stop_by or "code 1"
    environment = {
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "SAID": str(home / "said"),
        "REQUEUED": str(home / "requeued"),
        "CODE": code,
        "REASON": reason,
        "TRAINS": "yes" if asked else "",
        **more,
    }
    process = subprocess.Popen(["bash", "-c", script], cwd=home / "vit", env=environment)
    if isinstance(stop_by, signal.Signals):
        while not (home / "said").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(stop_by)
    return process.wait(300)


def _pod_script() -> str:
    _, job = yaml.safe_load_all((ROOT / "launch/kubernetes_job.yaml").read_text())
    return job["spec"]["template"]["spec"]["containers"][0]["args"][0]


def started(home: Path) -> tuple[dict[str, str], RunConfig]:
    """torchrun's options, and the settings that the run was given."""
    words = (home / "said").read_text().split("\n")[:-1]
    at = words.index("--config")
    options, program = words[: at - 1], words[at - 1]
    if program == "launch.pretrain":
        assert options.pop() == "-m"
    else:
        assert program == "launch/pretrain.py"
    return dict(zip(options[::2], options[1::2], strict=True)), read_settings(RunConfig, words[at:])


@pytest.mark.parametrize(
    ("code", "stop_by", "requeued"),
    [
        ("75", signal.SIGUSR1, True),  # Before its time is over.
        ("75", "SIGTERM", True),  # A preemption that leaves time signals the ranks alone.
        ("75", signal.SIGTERM, False),  # scancel. After a preemption without time SLURM queues the job itself.
        ("75", "the stop file", False),  # Of a person.
        ("0", None, False),
        ("2", None, False),
        ("", None, False),
    ],
)
def test_slurm(home: Path, code: str, stop_by: signal.Signals | str | None, requeued: bool) -> None:
    """Queued again when the scheduler stopped the run; not when a person did, when it is done, refused, or never said a
    word.
    """
    folder = home / "runs" / "vit"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text('{"code": 75}')  # Of the job before.
    (folder / "stop").touch()  # For the job before, which had ended: this one trained nothing, and was queued again.
    script = (ROOT / "launch/slurm.sh").read_text().replace("/shared/runs/vit_l16", str(folder))
    slurm = {
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
    }
    run(home, script, code, stop_by, **slurm)
    assert (folder / "stop").exists() == isinstance(stop_by, signal.Signals)
    assert (home / "requeued").exists() == requeued
    if requeued:
        assert (home / "requeued").read_text() == "1234\n"
    assert "--cpus-per-task=64" in (home / "srun").read_text().split()
    options, settings = started(home)
    assert options == {
        "--nnodes": "2",
        "--nproc_per_node": "8",
        "--node_rank": "0",
        "--master_addr": "node1",
        "--master_port": "21234",
    }
    assert (settings.out, settings.name) == (str(home / "runs"), "vit")
    assert settings.model.name == "ViT-L/16"


@pytest.mark.parametrize(
    ("code", "stop_by", "plan", "expected"),
    [
        ("75", signal.SIGTERM, 0, 75),
        ("0", None, 0, 0),
        ("2", None, 0, 2),
        ("-1", None, 0, 255),
        ("", None, 0, 1),
        ("", None, 2, 2),  # A misspelt setting, or no data: it was tried again.
    ],
)
def test_kubernetes(home: Path, code: str, stop_by: signal.Signals | None, plan: int, expected: int) -> None:
    """A pod ends as its run did; 2, which fails the whole job, only when the run was refused. Nor does it as the run's
    last start.
    """
    (home / "bin/vit").write_text(f'#!/bin/bash\n[ "$1" = plan ] && exit {plan}\n')
    (home / "bin/vit").chmod(0o755)
    (home / "runs" / "vit").mkdir(parents=True)
    (home / "runs" / "vit" / "status.json").write_text('{"code": 0}')
    _, job = yaml.safe_load_all((ROOT / "launch/kubernetes_job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    values = {pair["name"]: pair["value"] for pair in container["env"]} | {"RUN": str(home / "runs" / "vit")}
    assert run(home, container["args"][0], code, stop_by, JOB_COMPLETION_INDEX="3", **values) == expected
    options, settings = started(home)
    assert options["--node_rank"] == "3"
    assert (settings.out, settings.name) == (str(home / "runs"), "vit")


def test_each_number_of_kubernetes_is_in_a_marked_line(home: Path) -> None:
    """The script has none of its own: with fewer nodes in the marked lines its pods waited for the others."""
    text = (ROOT / "launch/kubernetes_job.yaml").read_text()
    marked = re.sub(r"\b8\b(?=.*# <-)", "4", text)
    _, job = yaml.safe_load_all(marked)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    values = {pair["name"]: pair["value"] for pair in container["env"]} | {"RUN": str(home / "runs" / "vit")}
    run(home, container["args"][0], "0", JOB_COMPLETION_INDEX="0", **values)
    options, _ = started(home)
    assert (job["spec"]["completions"], job["spec"]["parallelism"], options["--nnodes"]) == (4, 4, "4")
    assert (container["resources"]["limits"]["nvidia.com/gpu"], options["--nproc_per_node"]) == (4, "4")


def test_the_ranks_of_an_evicted_pod_hear_of_it_at_once(home: Path) -> None:
    """On NFS rank 0, in another pod, may see the stop file only when this pod has been killed."""
    rank = 'trap \'echo heard >> "$0"; exit\' USR1; touch "$0.there"; for _ in {1..1200}; do sleep 0.05; done'
    (home / "bin/torchrun").write_text(
        f"#!/bin/bash\ncd {home}\nfor rank in 0 1; do bash -c {shlex.quote(rank)} $rank & done\n"
        "while [ ! -e 0.there ] || [ ! -e 1.there ]; do sleep 0.05; done\ntouch said\nwait\n"
    )
    run(home, _pod_script(), "75", signal.SIGTERM, JOB_COMPLETION_INDEX="3", RUN=str(home / "runs" / "vit"))
    assert [(home / rank).read_text() for rank in "01"] == ["heard\n", "heard\n"]


def test_evictions_in_kubernetes_use_up_no_retries() -> None:
    """Each ends all pods, of which Kubernetes knows only one as evicted: after 28 of them a job of 8 nodes had
    failed.
    """
    _, job = yaml.safe_load_all((ROOT / "launch/kubernetes_job.yaml").read_text())
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
    assert actions == {2: "FailJob", RESUME: "Ignore"}


def test_kuberay() -> None:
    spec = yaml.safe_load((ROOT / "launch/kuberay.yaml").read_text())["spec"]
    vit, launcher, command, *settings = shlex.split(spec["entrypoint"])
    assert (vit, launcher, command) == ("vit", "ray_run", "pretrain")
    assert (ROOT / "launch" / f"{launcher}.py").exists()
    assert read_settings(RunConfig, settings).out == "/shared/runs"
    assert f"ray[default]=={spec['rayClusterSpec']['rayVersion']}" in (ROOT / "pyproject.toml").read_text()


def test_pods_use_the_user_and_folder_of_the_image() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    user, group = re.search(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE).groups()
    folder = re.findall(r"^WORKDIR (\S+)$", dockerfile, re.MULTILINE)[-1]
    _, job = yaml.safe_load_all((ROOT / "launch/kubernetes_job.yaml").read_text())
    cluster = yaml.safe_load((ROOT / "launch/kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    pods = [
        group["template"]["spec"] for group in (job["spec"], cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    for pod in pods:
        assert pod["securityContext"]["runAsUser"] == int(user)
        assert pod["securityContext"]["runAsGroup"] == pod["securityContext"]["fsGroup"] == int(group)
        assert [container["workingDir"] for container in pod["containers"]] == [folder]
