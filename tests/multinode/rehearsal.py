"""`make rehearsal`: the README's three cluster commands in order, on three hosts, one of which is killed during each.

Pre-training is started by torchrun on each host instead of `deepspeed --hostfile`, and goes on with the hosts that are
left. The hosts are namespaces of this machine (tests/helpers/hosts.py; needs root and iproute2), the data is tiny.
The commands are read from the README; only /data and sizes are replaced. What each leaves is compared with the same
command undisturbed on this machine: shards byte for byte, losses and weights bit for bit, every score of the VTAB
table.
"""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import hosts
import yaml
from cluster import (
    CPU_RANKS,
    copy_repository,
    frozen_task,
    ray_environment,
    readme_commands,
    start_ray,
    wait_for,
    wait_for_ray,
)
from forked import Forge
from hosts import Host
from ranks import metrics
from raw_images import contents, jpeg, write_class_tars
from tiny_vtab import prepare_tasks

from pipeline.experiment.vtab_tasks import GROUPS, TASKS
from pipeline.settings import schema

NUM_IMAGES, STEPS = 480, 60
SHARD_SIZES = ["samples_per_shard=40", "val_share=0.1"]
TRAIN_SIZES = [
    "model.image_size=32",
    "model.width=32",
    "model.depth=2",
    "model.mlp_width=64",
    "model.num_heads=2",
    "data.streams=4",
    "data.threads=1",
    "train.global_batch=12",
    "train.micro_batch=4",
    f"train.length={STEPS} steps",
    "train.log_every=1",
    "schedule.warmup=5 steps",
    "evaluate.every=100%",
    "checkpoint.every=4 steps",
    "checkpoint.keep=100",
]
VTAB_SIZES = [
    "seeds=[0]",
    "protocol.image_size=32",
    "protocol.batch=16",
    "protocol.length=[2 steps]",
    "protocol.schedule.warmup=0 steps",
    "threads=1",
]


class Rehearsal:
    """Three hosts with Ray, and a user on node1. home: shared by all; `home/data` is the README's /data."""

    def __init__(self, home: Path, nodes: list[Host]) -> None:
        self.home, self.nodes, self.began = home, nodes, time.monotonic()
        self.data, self.alone = home / "data", home / "undisturbed"
        self.checkout = copy_repository(home / "checkout")
        self.environment = ray_environment(home)
        self.summary: list[tuple[str, str, str, float]] = []

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def up(self, *nodes: Host) -> None:
        """Start Ray on hosts that have nothing yet; the first one of all is Ray's head."""
        starting = []
        for node in nodes:
            log = self.home / f"ray-{node.name}-{time.monotonic_ns()}.log"
            starting.append((start_ray(node, self.nodes[0], self.environment, log), log))
            if node is self.nodes[0]:
                wait_for_ray(*starting[-1])
        for process, log in starting:
            wait_for_ray(process, log)
        self.say(f"Ray is up on {', '.join(node.name for node in nodes)}")

    def words(self, command: list[str], *sizes: str) -> list[str]:
        """A command of the README with this cluster's paths, those in its config included, and other sizes."""
        config = yaml.safe_load((ROOT / command[command.index("--config") + 1]).read_text())
        paths = [f"{k}={v}" for k, v in config.items() if str(v).startswith("/data/")]
        return [word.replace("=/data/", f"={self.data}/") for word in [*command, *paths]] + list(sizes)

    def start(self, name: str, *words: str, host: Host | None = None) -> tuple[subprocess.Popen, Path]:
        """Run a command on a host, by default node1. Returns its process and log."""
        host = host or self.nodes[0]
        self.say(f"{host.name}$ {shlex.join(words).replace(str(self.home), '')}")
        log = self.home / f"{name}-{host.name}.log"
        environment = {**self.environment, **CPU_RANKS, "RAY_ADDRESS": f"http://{self.nodes[0].address}:8265"}
        with open(log, "w") as file:
            process = host.start(*words, cwd=self.checkout, env=environment, stdout=file, stderr=subprocess.STDOUT)
        return process, log

    def start_alone(self, name: str, job: list[str], *others: str) -> tuple[subprocess.Popen, Path]:
        """Run what `ray job submit` runs on this machine, without a cluster."""
        log = self.home / f"{name}-undisturbed.log"
        alone = {name: value for name, value in self.environment.items() if not name.startswith("RAY_AUTH")}
        command = [*job[job.index("--") + 1 :], *others]
        with open(log, "w") as file:
            return subprocess.Popen(command, cwd=self.checkout, env=alone, stdout=file, stderr=subprocess.STDOUT), log

    def kill_at_work(
        self, victim: Host, job: subprocess.Popen, log: Path, task: tuple[str, ...], done: Callable[[], int]
    ) -> int:
        """Kill a host of Ray in the middle of a task, after others have done two. Returns how many are done then."""
        frozen = {}

        def all_at_work() -> bool:
            for node in self.nodes:
                if node not in frozen and (process := frozen_task(node, *task)):
                    frozen[node] = process
            return len(frozen) == len(self.nodes)

        wait_for(all_at_work, job, log)
        for node, process in frozen.items():
            if node is not victim:
                process.send_signal(signal.SIGCONT)
        before = wait_for(lambda: done() >= 2 and done(), job, log)
        victim.kill()
        self.say(f"killed {victim.name} in the middle of a task; {before} are done")
        return before

    @contextmanager
    def phase(self, name: str, killed: Host) -> Iterator[list[str]]:
        """Times a phase; what is put into the list is what was lost."""
        self.say(f"---- {name}")
        lost: list[str] = []
        begin = time.monotonic()
        yield lost
        self.summary.append((name, killed.name, "; ".join(lost), time.monotonic() - begin))


def finish(process: subprocess.Popen, log: Path) -> str:
    """Wait for the end of a command. Returns what it printed; fails with that if it failed."""
    code = process.wait(timeout=300)
    assert code == 0, f"exit code {code}:\n{log.read_text()}"
    return log.read_text()


def retries(log: str) -> int:
    return max(map(int, re.findall(r"retries so far: (\d+)", log)), default=0)


# ---------------------------------------------------------------------- the phases
def shard(on: Rehearsal, command: list[str], reference: tuple[subprocess.Popen, Path]) -> None:
    victim, out = on.nodes[1], on.data / "imagenet21k_shards"
    with on.phase("shard", victim) as lost:
        job, log = on.start("shard", *on.words(command, *SHARD_SIZES))
        task = ("write_shard", r"\.tar\.\w+\.tmp$")
        before = on.kill_at_work(victim, job, log, task, lambda: len(list(out.glob("*.tar"))))
        printed = finish(job, log)
        assert retries(printed) == 1, printed
        lost.append("the shard it was writing; made again by another host")
    finish(*reference)
    found, expected = contents(out), contents(on.alone / "imagenet21k_shards")
    assert found == expected, sorted({*found} ^ {*expected}) or [k for k in found if found[k] != expected[k]]
    shards = sum(name.endswith(".tar") for name in found)
    assert 2 <= before < shards
    on.say(f"{shards} shards and their manifest are those of an undisturbed job, byte for byte")


def torchrun(node: Host, first: Host) -> list[str]:
    """The words that start a rank on this host. Hosts of a rehearsal know each other's names by ssh alone."""
    options = [
        "--nnodes=1:3",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-id=rehearsal",
        f"--rdzv-endpoint={first.address}:29500",
        f"--rdzv-conf=is_host={int(node is first)}",
        f"--local-addr={node.address}",
    ]
    return ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun", *options]


def pretrain(on: Rehearsal, command: list[str]) -> Path:
    """Returns the run's folder."""
    victim, run = on.nodes[2], on.data / "runs/vit_l16_imagenet21k"
    with on.phase("pre-train", victim) as lost:
        words = on.words(command, *TRAIN_SIZES)
        words = words[words.index("launch/pretrain.py") :]
        agents = [on.start("pretrain", *torchrun(node, on.nodes[0]), *words, host=node) for node in on.nodes]
        process, log = agents[0]

        def step() -> int:
            with suppress(OSError, json.JSONDecodeError):
                return max(metrics(run), default=0)
            return 0

        wait_for(lambda: step() >= 10, process, log)
        victim.kill()
        died_at = step()
        on.say(f"killed {victim.name} in step {died_at + 1} or later")
        assert died_at < STEPS - 5
        for agent in agents[:2]:
            finish(*agent)
        said = (run / "log.txt").read_text()
        (resumed,) = map(int, re.findall(rf"resumed from .* at step (\d+) of {STEPS}", said))
        assert "12 = 3 ranks" in said
        assert "12 = 2 ranks" in said, said
        lost.append(f"steps {resumed + 1} to {died_at}; trained again by the two others")
    on.say(f"node1 and node2 went on from step {resumed} to step {STEPS}")
    compare_training(on, run, resumed)
    return run


def compare_training(on: Rehearsal, run: Path, resumed: int) -> None:
    """The same without a kill: three ranks, then two from the checkpoint with which the disturbed run went on."""
    settings = schema.flatten(yaml.safe_load((run / "config.yaml").read_text()))
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    overrides += [f"out={on.alone}", "track.enabled=false", "track.figures=false"]
    alone = on.alone / run.name
    with Forge(on.home) as forge:
        forge.start(3, overrides).finish()
        whole = metrics(alone)
        for checkpoint in (alone / "checkpoints").glob("step-*"):
            if int(checkpoint.name.removeprefix("step-")) > resumed:
                shutil.rmtree(checkpoint)
        said = forge.start(2, overrides).finish()
        assert f"at step {resumed} of {STEPS}" in said, said
    found, expected = metrics(run), metrics(alone)
    assert list(found) == list(range(1, STEPS + 1)), found
    assert found == expected, [(k, found[k], expected.get(k)) for k in found if found[k] != expected.get(k)]
    assert all(found[k] == whole[k] for k in range(1, resumed + 1))
    last = f"checkpoints/step-{STEPS:08d}/model.safetensors"
    assert (run / last).read_bytes() == (alone / last).read_bytes(), "the weights differ"
    on.say(
        f"{STEPS} losses and the weights are those of 3 ranks to step {resumed} and 2 from there, undisturbed, bit"
        " for bit"
    )


def vtab(on: Rehearsal, command: list[str], run: Path) -> None:
    victim, out = on.nodes[1], run / "vtab/vit_paper-finetune"
    with on.phase("VTAB", victim) as lost:
        words = on.words(command, *VTAB_SIZES)
        job, log = on.start("vtab", *words)
        before = on.kill_at_work(victim, job, log, ("run_cell",), lambda: len(list(out.glob("cells/*.json"))))
        reference = on.start_alone("vtab", words, f"out={on.alone / 'vtab'}", "mlflow=none")
        printed = finish(job, log)
        assert 2 <= before < len(TASKS)
        assert retries(printed) == 1, printed
        lost.append("the cell it was training; trained again by another host")
    finish(*reference)
    assert (out / "results.json").read_bytes() == (on.alone / "vtab/results.json").read_bytes(), "other scores"
    on.say(f"results.json with the scores of {len(TASKS)} tasks is that of an undisturbed sweep, byte for byte")


def rehearse(home: Path, nodes: list[Host]) -> None:
    on = Rehearsal(home, nodes)
    sharding, training, scoring = readme_commands()
    pictures = [jpeg(seed, width=640, height=480) for seed in range(4)]
    images = {f"n{i % 3:08d}/{i:04d}.jpg": pictures[i % len(pictures)] for i in range(NUM_IMAGES)}
    on.data.mkdir()
    write_class_tars(images, on.data / "imagenet21k")
    prepare_tasks(on.data / "vtab", [task.name for task in TASKS])
    on.say(f"{NUM_IMAGES} images and {len(TASKS)} tasks are in {on.data}")
    alone = on.start_alone(
        "shard", on.words(sharding, *SHARD_SIZES), f"out={on.alone / 'imagenet21k_shards'}", "num_tasks=1"
    )
    on.up(*nodes)
    shard(on, sharding, alone)
    on.nodes[1].boot()
    on.up(on.nodes[1])
    run = pretrain(on, training)
    on.nodes[2].boot()
    on.up(on.nodes[2])
    vtab(on, scoring, run)
    show_table(on, run / "vtab/vit_paper-finetune/report")
    on.say("---- done")
    width = max(len(lost) for _, _, lost, _ in on.summary)
    for name, killed, lost, seconds in on.summary:
        print(f"{name:<9}  killed {killed}  lost {lost:<{width}}  {seconds:4.0f} s")


def show_table(on: Rehearsal, report: Path) -> None:
    """Print the final table, ours and the paper's; fails if a score or a mean of ours is missing."""
    with open(report / "scores.csv") as file:
        rows = [row for row in csv.DictReader(file) if not row["model"].endswith("(paper)")]
    scores = {row["name"]: float(row["accuracy"]) for row in rows}
    assert list(scores) == [*(task.name for task in TASKS), *GROUPS, "all"], scores
    on.say("---- the final table")
    table = (report / "report.md").read_text().partition("\n|")[2].partition("\n\n")[0]
    print(f"|{table}")


def main() -> None:
    if reason := hosts.why_not():
        sys.exit(f"error: {reason}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    home = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    try:
        with hosts.network(3, [home, ROOT, Path(sys.prefix)]) as nodes:
            rehearse(home, nodes)
    except BaseException:
        print(f"FAILED. Logs of all commands are in {home}", flush=True)
        raise
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
