"""torchrun's elastic agents on hosts: hosts die and join, and the run goes on; a stop and a mistake end it."""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster import Site, wait_for
from polling import until
from ranks import metrics, settings

from pipeline.cluster.status_files import RESUME, read_status

pytestmark = pytest.mark.hosts


class Agents:
    """torchrun on the hosts of a site, for one run. node1 must stay: it holds the rendezvous."""

    def __init__(self, site: Site, run: list[str], port: int) -> None:
        self.site, self.run, self.port, self.started = site, run, port, dict[int, subprocess.Popen]()

    def start(self, number: int) -> None:
        self.started[number] = self.site.nodes[number].start(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=10.77.0.1:{self.port}",
            f"--rdzv-id={self.port}",
            # Hosts of a test have no names that can be looked up.
            f"--rdzv-conf=is_host={int(number == 0)}",
            f"--local-addr=10.77.0.{number + 1}",
            "launch/pretrain.py",
            *self.run,
            cwd=self.site.folder,
            env={**self.site.environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=self.log(number).open("w"),
            stderr=subprocess.STDOUT,
        )

    def log(self, number: int) -> Path:
        return self.site.folder / f"torchrun-{self.port}-{number}.log"

    def processes(self, number: int, word: str) -> Iterator[psutil.Process]:
        """Those of this run on a host that have a word on their command line."""
        for process in self.site.nodes[number].processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if {word, self.run[0]} <= set(process.cmdline()):
                    yield process

    def agent(self, number: int) -> psutil.Process:
        return next(self.processes(number, "torch.distributed.run"))

    def rank(self, number: int) -> psutil.Process:
        (rank,) = self.agent(number).children()
        return rank


@pytest.fixture
def data(site: Site, dataset: Path) -> Path:
    path = site.folder.parent / "data"
    if not path.exists():
        shutil.copytree(dataset, path)
    return path


def test_hosts_die_and_join_and_the_run_goes_on(site: Site, data: Path) -> None:
    from test_train import plain_losses

    def starts() -> list[str]:
        """The numbers of ranks of all starts."""
        log = folder / "log.txt"
        return re.findall(r"24 = (\d) ranks? x", log.read_text() if log.exists() else "")

    def step() -> int:
        status = read_status(folder)
        return status.step if status and status.status == "running" else 0

    def goes_on(*ranks: str) -> None:
        """Until a step is committed after starts of so many ranks."""
        wait_for(lambda: starts() == list(ranks), agents.started[0], agents.log(0))
        begin = step()
        until(lambda: step() > begin + 2)

    out = site.folder.parent / "runs"
    run = settings(data, out, "elastic", "schedule.decay=constant", "evaluate.every=100%", "checkpoint.every=1 steps")
    folder, agents = out / "elastic", Agents(site, [*run, "train.length=1000000 steps"], 29_401)
    agents.start(0)
    agents.start(1)
    goes_on("2")
    agents.rank(1).kill()
    goes_on("2", "2")
    site.nodes[1].kill()
    goes_on("2", "2", "1")
    agents.start(2)
    goes_on("2", "2", "1", "2")
    for number in (0, 2):
        agents.agent(number).send_signal(signal.SIGTERM)
    for number in (0, 2):  # torchrun's own code: 1, or on a busy machine -6, when its rendezvous ends before it.
        assert agents.started[number].wait(300) != 0
    status = read_status(folder)
    assert (status.status, status.code, status.step) == ("stopped", RESUME, max(metrics(folder)))
    steps = status.step + 5
    agents.run = [*run, f"train.length={steps} steps"]
    agents.start(0)
    assert agents.started[0].wait(300) == 0, agents.log(0).read_text()
    found = metrics(folder)
    assert list(found) == list(range(1, steps + 1))
    assert list(found.values()) == pytest.approx(plain_losses(run, steps), rel=2e-3)
    site.nodes[1].boot()


def test_a_stop_and_a_mistake_are_not_tried_again(site: Site, data: Path) -> None:
    out = site.folder.parent / "runs"
    run = settings(data, out, "asked_to_stop", "train.length=1000000 steps", "checkpoint.every=1 steps")
    folder, agents = out / "asked_to_stop", Agents(site, run, 29_402)
    agents.start(0)
    agents.start(1)
    wait_for(
        lambda: folder.exists() and (status := read_status(folder)) and status.step > 2,
        agents.started[0],
        agents.log(0),
    )
    (folder / "stop").touch()
    for number in (0, 1):
        agents.started[number].wait(300)
    status = read_status(folder)
    assert (status.status, status.code) == ("stopped", RESUME)
    assert (folder / "log.txt").read_text().count("24 = 2 ranks") == 1

    mistaken = Agents(site, [*run, "model.depth=0"], 29_403)
    mistaken.start(0)
    mistaken.start(1)
    for number in (0, 1):
        assert mistaken.started[number].wait(300) == 1
    said = [mistaken.log(number).read_text() for number in (0, 1)]
    assert "".join(said).count("error: ") == 1, said
    assert "model.depth" in "".join(said)
