"""`ray job submit` on a cluster of two hosts: a run that is stopped and goes on; sharding, while one of them dies."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import hosts
import psutil
import pytest
from forked import Forge
from hosts import Host
from ranks import metrics, settings
from raw_images import contents, jpeg

from pipeline.lifecycle.run_folder import RESUME, read_status

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
STEPS = 400
SAMPLES_PER_SHARD, NUM_SHARDS = 40, 12


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def checkout(home: Path) -> Path:
    """What a user has: this repository, and beside its files more than should be sent to a cluster."""
    folder = home / "checkout"
    for name in ("launch", "pipeline", "data_tools", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in (".venv/lib", "runs/vit", "elsewhere/photos"):
        (folder / name).mkdir(parents=True)
        with open(folder / name / "large.tar", "wb") as file:
            file.truncate(2**32)
    (folder / "elsewhere").rename(home / "elsewhere")
    (folder / "datasets").symlink_to(home / "elsewhere")
    return folder


@pytest.fixture(scope="module")
def source(home: Path) -> Path:
    """Pictures large enough that a shard takes some time."""
    folder = home / "raw"
    data = [jpeg(seed, width=640, height=480) for seed in range(4)]
    for i in range(SAMPLES_PER_SHARD * NUM_SHARDS):
        path = folder / f"class{i % 3}" / f"{i:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[i % len(data)])
    return folder


@pytest.fixture(scope="module")
def environment(home: Path) -> dict[str, str]:
    """Of the cluster and who talks to it; nothing of this machine's own Ray."""
    (home / "token").write_text("0123456789abcdef" * 4)
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home / "token"),
        "RAY_JOB_STOP_WAIT_TIME_S": "30",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "eth0",
        # A dead node is given up after seconds.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        # This machine's memory is used by others too, for whom Ray would kill workers here.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.fixture(scope="module")
def cluster(can_have_hosts: None, environment: dict[str, str], home: Path) -> Iterator[list[Host]]:
    """A Ray of one CPU on each host."""
    with hosts.network(2, [home, ROOT]) as nodes:
        processes = _start_ray(nodes, environment, home)
        yield nodes
        for host, process in zip(nodes, processes, strict=True):
            host.kill()
            process.wait()


def _start_ray(nodes: list[Host], environment: dict[str, str], home: Path) -> list[subprocess.Popen]:
    head, worker = nodes
    join = {
        head: ["--head", "--port=6379", "--dashboard-host=0.0.0.0", "--no-monitor"],
        worker: [f"--address={head.address}:6379"],
    }
    processes = []
    for host in nodes:
        log = home / f"{host.name}.log"
        command = ["ray", "start", "--block", f"--node-ip-address={host.address}", *join[host]]
        command += ["--num-cpus=1", "--object-store-memory=100000000", "--include-log-monitor=false"]
        with open(log, "w") as file:
            processes.append(host.start(*command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        wait_for(lambda log=log: "Ray runtime started" in log.read_text(), processes[-1], log)
    return processes


def wait_for(condition: Callable[[], T], process: subprocess.Popen, log: Path, seconds: float = 180) -> T:
    """What a condition is when it holds; fails with the log when the process ends before that, or time is up."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert process.poll() is None, f"ended with {process.returncode}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"still waiting:\n{log.read_text()}"
        time.sleep(0.02)
    return result


def frozen_task(host: Host) -> psutil.Process | None:
    """A worker of the host, stopped in the middle of a shard; None when there is none at the moment."""
    for process in host.processes("ray::write_shard"):
        process.send_signal(signal.SIGSTOP)
        while process.status() != psutil.STATUS_STOPPED:
            pass
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # Of one of its other threads.
                if re.search(r"\.tar\.\w+\.tmp$", os.readlink(file)):
                    return process
        process.send_signal(signal.SIGCONT)
    return None


@pytest.fixture(scope="module")
def undisturbed(source: Path, environment: dict[str, str], home: Path) -> Iterator[subprocess.Popen]:
    """The same job on this machine, into the folder `undisturbed`, while the cluster starts."""
    alone = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH")}
    command = [sys.executable, *shard_command(source, home / "undisturbed"), "num_tasks=1"]
    with subprocess.Popen(command, cwd=ROOT, env=alone) as process:
        yield process
        process.terminate()


def shard_command(source: Path, out: Path) -> list[str]:
    return ["launch/shard.py", f"source={source}", f"out={out}", f"samples_per_shard={SAMPLES_PER_SHARD}"]


def test_ranks_on_ray_stop_and_go_on(
    forge: Forge, checkout: Path, environment: dict[str, str], cluster: list[Host], dataset: Path, home: Path
) -> None:
    head, _ = cluster
    shutil.copytree(dataset, home / "data")
    run = settings(home / "data", home / "runs", "on_ray", f"train.length={STEPS} steps", "evaluate.every=100%")
    environment = {**environment, "RAY_ADDRESS": f"http://{head.address}:8265"}
    folder = home / "runs/on_ray"

    def submit(number: int) -> tuple[subprocess.Popen, Path]:
        log = home / f"train-{number}.log"
        command = ["ray", "job", "submit", "--submission-id", f"train-{number}", "--working-dir", ".", "--", "python"]
        command += ["launch/ray_run.py", "launch/pretrain.py", *run]
        with open(log, "w") as file:
            return head.start(*command, cwd=checkout, env=environment, stdout=file, stderr=subprocess.STDOUT), log

    job, log = submit(1)
    wait_for(lambda: "step 3/" in log.read_text(), job, log)
    head.run("ray", "job", "stop", "train-1", env=environment)
    job.wait(timeout=60)
    assert "rank 0 on 10.77.0." in log.read_text()
    stopped = read_status(folder)
    assert stopped
    assert (stopped.status, stopped.code, stopped.reason) == ("stopped", RESUME, "SIGTERM")
    assert 3 <= stopped.step < STEPS

    alone = forge.start(1, [*run, f"out={home / 'alone'}"])
    job, log = submit(2)
    assert job.wait(timeout=180) == 0, log.read_text()
    alone.finish()
    assert "24 = 2 ranks x 2 x 6 samples" in log.read_text()
    found, expected = metrics(folder), metrics(home / "alone/on_ray")
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=2e-3), step


def test_a_node_that_dies_costs_its_tasks_and_no_byte(
    checkout: Path, source: Path, environment: dict[str, str], undisturbed: subprocess.Popen, cluster: list[Host],
    home: Path,
) -> None:  # fmt: skip
    head, worker = cluster
    out, log = home / "out", home / "job.log"
    environment = {**environment, "RAY_ADDRESS": f"http://{head.address}:8265"}
    submit = ["ray", "job", "submit", "--working-dir", ".", "--", "python", *shard_command(source, out)]
    with open(log, "w") as file:
        job = head.start(*submit, cwd=checkout, env=environment, stdout=file, stderr=subprocess.STDOUT)

    wait_for(lambda: len(list(out.glob("*.tar"))) >= 2, job, log)
    # Both work. (Stop the head first: it might finish the job before the other begins.)
    of_head = wait_for(lambda: frozen_task(head), job, log)
    wait_for(lambda: frozen_task(worker), job, log)
    worker.kill()
    progress = out / "progress.json"
    wait_for(lambda: json.loads(progress.read_text())["retries"], job, log)
    state = json.loads(progress.read_text())
    num_done = len(list(out.glob("*.tar")))
    assert 2 <= num_done < NUM_SHARDS
    assert (state["retries"], state["shards"], state["images"]) == (1, num_done, num_done * SAMPLES_PER_SHARD)
    assert (state["total_shards"], state["total_images"]) == (NUM_SHARDS, NUM_SHARDS * SAMPLES_PER_SHARD)
    assert len(list(out.glob(".*.tmp"))) == 2
    of_head.send_signal(signal.SIGCONT)
    assert job.wait(timeout=120) == 0, log.read_text()
    printed = log.read_text()
    assert "retries so far: 1" in printed
    assert "retries so far: 2" not in printed
    sent = head.run("find", "/tmp/ray/session_latest/runtime_resources/working_dir_files/", "-type", "f")
    assert "launch/shard.py" in sent
    assert "large.tar" not in sent
    assert undisturbed.wait(timeout=120) == 0
    assert contents(out) == contents(home / "undisturbed")
