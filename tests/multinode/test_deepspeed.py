"""`deepspeed --hostfile` on three hosts, with sshd and pdsh as on any cluster; one of them dies, and the run is
finished.
"""

import contextlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import CPU_RANKS, Site, wait_for
from hosts import Host
from polling import until
from ranks import metrics, settings

from pipeline.cluster.status_files import RESUME, read_status

pytestmark = pytest.mark.hosts
STEPS = 36
# 3 ranks, and 2 once node3 is gone.
SLOTS = {"node1": 1, "node2": 1, "node3": 1}


def write_hostfile(site: Site, slots: dict[str, int]) -> None:
    (site.folder / "hosts").write_text("".join(f"{host} slots={count}\n" for host, count in slots.items()))


def start_run(
    site: Site,
    dataset: Path,
    name: str,
    *more: str,
    log: Path,
    before: tuple[str, ...] = (),
    slots: dict[str, int] = SLOTS,
) -> Any:
    """`deepspeed` on the hosts of `slots`, from node1; -> (the way into node1, the run's folder, its settings)."""
    home = site.folder.parent
    data, out = home / "data", home / "runs"
    if not data.exists():
        shutil.copytree(dataset, data)
    write_hostfile(site, slots)
    (site.folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in CPU_RANKS.items()))
    run = settings(data, out, name, "evaluate.every=100%", "checkpoint.every=5 steps", *more)
    launch = ["deepspeed", "--hostfile", "hosts", "--launcher", "pdsh", "--no_ssh_check", "--master_addr", "10.77.0.1"]
    return site.start(*before, *launch, "launch/pretrain.py", *run, log=log), out / name, run


@pytest.mark.parametrize("victim", ["bin/deepspeed ", "ssh -o"])
def test_ranks_on_all_hosts_stop_when_their_launcher_is_gone(
    site: Site, dataset: Path, tmp_path: Path, victim: str
) -> None:
    name, log = f"without{''.join(filter(str.isalpha, victim))}", tmp_path / "log.txt"
    slots = {"node1": 1, "node2": 1}  # A rank and the launcher of a host are a process each that imports DeepSpeed.
    process, folder, _ = start_run(site, dataset, name, "train.length=1000000 steps", log=log, slots=slots)

    def running(node: Host, *words: str) -> list[psutil.Process]:
        found = []
        for process in node.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if all(word in " ".join([process.name(), *process.cmdline()]) for word in (name, *words)):
                    found.append(process)
        return found

    def ranks() -> list[psutil.Process]:
        return [process for node in site.nodes for process in running(node, "--local_rank")]

    def step() -> int:
        status = read_status(folder)
        return status.step if status else 0

    wait_for(lambda: step() >= 5, process, log)
    assert len(ranks()) == sum(slots.values())
    running(site.nodes[0], victim)[0].kill()
    until(lambda: not ranks())
    status = read_status(folder)
    assert (status.status, status.code, status.step) == ("stopped", RESUME, max(metrics(folder))), log.read_text()
    assert re.fullmatch(r"the end of its launcher \((pdsh|the ssh connection), process \d+\)", status.reason)
    log_of_run = (folder / "log.txt").read_text()
    assert f"at step {status.step:,}, which is committed: the same command resumes it (exit code 75)" in log_of_run
    process.wait()


def test_a_host_dies_and_the_run_is_finished_on_those_that_the_hostfile_still_names(site: Site, dataset: Path) -> None:
    """By the supervisor. A person edits the hostfile."""
    from test_train import plain_losses  # Needs torch, which a host without network namespaces is spared.

    log = site.folder.parent / "supervise.out"
    supervise = (sys.executable, "launch/supervise.py", "pause_seconds=1", "--")
    process, folder, run = start_run(site, dataset, "three", f"train.length={STEPS} steps", log=log, before=supervise)

    def step() -> int:
        status = read_status(folder) if folder.exists() else None
        return status.step if status and status.status == "running" else 0

    wait_for(lambda: step() >= 6, process, log)
    write_hostfile(site, {"node1": 1, "node2": 1})
    site.nodes[2].kill()
    assert step() < STEPS - 5
    assert process.wait(timeout=500) == 0, log.read_text()
    said = (folder / "log.txt").read_text()
    assert re.findall(r"24 = (\d) ranks", said) == ["3", "2"]
    found = metrics(folder)
    assert list(found) == list(range(1, STEPS + 1))
    # Other samples, or another order, are off by ten percent.
    assert list(found.values()) == pytest.approx(plain_losses(run, STEPS), rel=2e-3)
