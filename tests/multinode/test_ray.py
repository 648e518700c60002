"""`ray job submit` on a cluster of two hosts: a run that is stopped and goes on; sharding, while one of them dies."""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from cluster import copy_repository, frozen_task, ray_environment, start_ray, wait_for, wait_for_ray
from hosts import Host
from ranks import ROOT, metrics, settings
from raw_images import contents, jpeg

from data_tools.sharding import shard
from pipeline.cluster import ray_tasks
from pipeline.cluster.status_files import RESUME, read_status
from pipeline.settings import schema
from pipeline.settings.commands.data import ShardConfig

SAMPLES_PER_SHARD, NUM_SHARDS = 40, 12
# The task of a shard, and its file.
SHARDING = ("write_planned", r"\.tar\.\w+\.tmp$")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def checkout(home: Path) -> Path:
    """What a user has: this repository, and beside its files more than should be sent to a cluster."""
    folder = copy_repository(home / "checkout")
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
    return ray_environment(home)


@pytest.fixture(scope="module")
def cluster(can_have_hosts: None, environment: dict[str, str], home: Path) -> Iterator[list[Host]]:
    """A Ray of one CPU on each host."""
    with hosts.network(2, [home, ROOT]) as nodes:
        processes = []
        for host in nodes:
            log = home / f"{host.name}.log"
            processes.append(start_ray(host, nodes[0], environment, log))
            wait_for_ray(processes[-1], log)
        yield nodes
        for host, process in zip(nodes, processes, strict=True):
            host.kill()
            process.wait()


@pytest.fixture(scope="module")
def undisturbed(source: Path, home: Path) -> Path:
    """The same data set, made in this process, without Ray."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_tasks, "connect", lambda num_cpus: 1)
        patch.setattr(
            ray_tasks, "run_tasks", lambda work, jobs, *rest, limit: ((i, work(job)) for i, job in enumerate(jobs))
        )
        return shard.run(schema.load(ShardConfig, None, shard_settings(source, home / "undisturbed"))).path


def shard_settings(source: Path, out: Path) -> list[str]:
    return [f"source={source}", f"out={out}", f"samples_per_shard={SAMPLES_PER_SHARD}"]


def test_ranks_on_ray_stop_and_go_on(
    checkout: Path, environment: dict[str, str], cluster: list[Host], dataset: Path, home: Path
) -> None:
    from test_train import plain_losses  # Needs torch, which a host without network namespaces is spared.

    head, _ = cluster
    shutil.copytree(dataset, home / "data")
    # With a constant rate, the losses do not depend on the length.
    times = ["evaluate.every=100%", "checkpoint.every=100%", "schedule.decay=constant"]
    run = settings(home / "data", home / "runs", "on_ray", *times)
    environment = {**environment, "RAY_ADDRESS": f"http://{head.address}:8265"}
    folder = home / "runs/on_ray"

    def submit(number: int, steps: int) -> tuple[subprocess.Popen, Path]:
        log = home / f"train-{number}.log"
        command = ["ray", "job", "submit", "--submission-id", f"train-{number}", "--working-dir", ".", "--", "python"]
        command += ["launch/ray_run.py", "launch/pretrain.py", *run, f"train.length={steps} steps"]
        with open(log, "w") as file:
            return head.start(*command, cwd=checkout, env=environment, stdout=file, stderr=subprocess.STDOUT), log

    job, log = submit(1, steps=100_000)
    wait_for(lambda: "step 3/" in log.read_text(), job, log)
    head.run("ray", "job", "stop", "train-1", env=environment)
    job.wait(timeout=300)
    assert "rank 0 on 10.77.0." in log.read_text()
    stopped = read_status(folder)
    assert (stopped.status, stopped.code, stopped.reason) == ("stopped", RESUME, "SIGTERM")
    assert stopped.step >= 3

    steps = stopped.step + 5
    job, log = submit(2, steps)
    assert job.wait(timeout=500) == 0, log.read_text()
    assert "24 = 2 ranks x 2 x 6 samples" in log.read_text()
    found = metrics(folder)
    assert list(found) == list(range(1, steps + 1))
    assert list(found.values()) == pytest.approx(plain_losses(run, steps), rel=2e-3)


def test_a_node_that_dies_costs_its_tasks_and_no_byte(
    checkout: Path, source: Path, environment: dict[str, str], undisturbed: Path, cluster: list[Host], home: Path
) -> None:
    head, worker = cluster
    out, log = home / "out", home / "job.log"
    environment = {**environment, "RAY_ADDRESS": f"http://{head.address}:8265"}
    submit = [
        "ray",
        "job",
        "submit",
        "--working-dir",
        ".",
        "--",
        "python",
        "launch/shard.py",
        *shard_settings(source, out),
    ]
    with open(log, "w") as file:
        job = head.start(*submit, cwd=checkout, env=environment, stdout=file, stderr=subprocess.STDOUT)

    wait_for(lambda: len(list(out.glob("*.tar"))) >= 2, job, log)
    # Both work. (Stop the head first: it might finish the job before the other begins.)
    of_head = wait_for(lambda: frozen_task(head, *SHARDING), job, log)
    wait_for(lambda: frozen_task(worker, *SHARDING), job, log)
    worker.kill()
    progress = out / "progress.json"
    wait_for(lambda: json.loads(progress.read_text())["retries"], job, log)
    state = json.loads(progress.read_text())
    num_done = len(list(out.glob("*.tar")))
    assert 2 <= num_done < NUM_SHARDS
    assert (state["retries"], state["shards"], state["images"]) == (1, num_done, num_done * SAMPLES_PER_SHARD)
    assert (state["total_shards"], state["total_images"]) == (NUM_SHARDS, NUM_SHARDS * SAMPLES_PER_SHARD)
    assert len(list(out.glob(".*.tar.*.tmp"))) == 2  # progress.json may be replaced at this moment.
    of_head.send_signal(signal.SIGCONT)
    assert job.wait(timeout=500) == 0, log.read_text()
    printed = log.read_text()
    assert "retries so far: 1" in printed
    assert "retries so far: 2" not in printed
    sent = head.run("find", "/tmp/ray/session_latest/runtime_resources/working_dir_files/", "-type", "f")
    assert "launch/shard.py" in sent
    assert "large.tar" not in sent
    assert contents(out) == contents(undisturbed)
