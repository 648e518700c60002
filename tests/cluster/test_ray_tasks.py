"""Messages about a Ray cluster that cannot be reached or is busy, and about a node that dies."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from polling import until
from ranks import ROOT

from launch import ray_run
from pipeline.base.errors import CrashError, Stopped, UserError
from pipeline.cluster import ray_tasks


# First: Ray reads its environment when it is imported, as a test below does.
def test_ranks_wait_for_resources_with_a_word_and_an_ear_for_signals(ray_cluster: int) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    said: list[str] = []
    held = placement_group([{"CPU": ray_cluster}])
    try:
        assert held.wait(300)
        until(lambda: not ray.available_resources().get("CPU"))  # The cluster's list of these may be older.
        with pytest.raises(Stopped):
            ray_tasks.run_ranks(["-c", ""], 1, 1, said.append, lambda: bool(said))
        assert said == ["waiting for 1 CPU, of which other jobs hold some (free: 0 CPUs)"]
    finally:
        remove_placement_group(held)


def test_a_lost_rank_is_a_crash(ray_cluster: int) -> None:
    """Not a mistake of the user (exit code 2), after which a supervisor does not start the run again."""
    kill = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    with pytest.raises(CrashError, match=r"^a rank is lost: "):
        ray_tasks.run_ranks(["-c", kill], 1, 1, print, lambda: False)


def test_a_cluster_that_runs_gets_this_library(ray_cluster: int, tmp_path: Path) -> None:
    """It was looked for in a folder above which it is not, and nothing ran on such a cluster."""
    import ray

    code = "import ray; from pipeline.cluster.ray_tasks import connect; connect()"
    code += "; print(ray.get_runtime_context().runtime_env)"
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": str(ROOT)}
    command, environment = [sys.executable, "-c", code], {**os.environ, **address}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("_ray_pkg_") == 2  # pipeline and data_tools.


def test_a_mistake_in_the_objective_is_said_before_the_cluster_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ranks said it, each, after they had waited for GPUs."""
    monkeypatch.setattr(ray_tasks, "connect", lambda *_: pytest.fail("it asks the cluster"))
    command = ["launch/pretrain.py", "name=x", f"out={tmp_path}", f"data.path={tmp_path}", "train.length=1 epochs"]
    of_mae = ["model.name=ViT-B/16", "model.positions=sincos2d_mae", "train.loss=mae"]
    for wrong, said in (("mask_share=2", "mask_share = 2"), ("mask=1", "unknown setting")):
        with pytest.raises(UserError, match=f"^train.loss = mae: .*{said}"):
            ray_run.run(0, 1, [*command, *of_mae, f"objective.{wrong}"])


def test_an_address_where_nobody_listens_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray itself would try for a minute.
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("it asks Ray"))
    for address in (
        "127.0.0.1:1",  # A port that no other test is given meanwhile.
        "ray://127.0.0.1:1",
        "[::1]:1",
        "127.0.0.1:99999",
        "no.such.host.invalid:1",
        ":6379",
        "http://127.0.0.1:8265",  # The dashboard's, which `ray job submit` takes.
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match=r"there is no Ray cluster .* unset RAY_ADDRESS to use this machine alone"):
            ray_tasks.connect()


def test_a_sigterm_while_ray_starts_is_as_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler of that time exited with the signal's number, 15, and without a word."""
    import ray

    def receive(handler: Callable[..., None]) -> None:
        signal.signal(signal.SIGTERM, handler)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # An earlier test may have started it.
    monkeypatch.setattr("ray._private.utils.set_sigterm_handler", receive)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            ray_tasks.connect()
    finally:
        signal.signal(signal.SIGTERM, before)


LATE = """
import contextlib, threading, time, psutil
from pipeline.cluster import ray_tasks
from pipeline.settings.command import mistakes_in_one_line

monotonic, waited = time.monotonic, []

def late():
    waited.append(31)
    return monotonic() + sum(waited)

def stop():
    while True:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.name() == "raylet":
                    child.suspend()
                    time.monotonic = late
                    return
        time.sleep(0.005)

threading.Thread(target=stop, daemon=True).start()
with mistakes_in_one_line():
    ray_tasks.connect(1)
"""


@pytest.mark.parametrize(
    ("folder", "reason"), [("", "The current node timed out during startup"), ("x" * 90, "AF_UNIX")]
)
def test_a_ray_that_does_not_start_is_one_line(own_ray: None, folder: str, reason: str) -> None:
    """As on a busy machine, where it takes longer than Ray waits, and in a folder where it cannot."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as parent:
        Path(parent, folder).mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", LATE],
            cwd=ROOT,
            env={**environment, "RAY_TMPDIR": str(Path(parent, folder)), "RAY_raylet_start_wait_time_s": "1"},
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 2, done.stderr
    *waited, said = done.stderr.splitlines()
    assert said.startswith("error: Ray did not start on this machine: ")
    assert reason in said
    assert "RAY_TMPDIR" in said
    assert [line.split()[0] for line in waited] == ["waiting"] * len(waited)  # After two seconds.


def test_as_many_tasks_fit_as_nodes_have_cpus_and_gpus_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs of a task are on one node."""
    import ray

    def nodes(*found: tuple[int, int]) -> None:
        listed = [
            {"Alive": True, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})}} for cpus, gpus in found
        ]
        monkeypatch.setattr(ray, "nodes", lambda: [*listed, {"Alive": False, "Resources": {"CPU": 99, "GPU": 99}}])

    nodes((64, 8), (64, 8), (16, 0))
    assert ray_tasks.capacity(8, 8) == (2, 8)
    assert ray_tasks.capacity(8, 3) == (4, 3)  # 2 GPUs of each node are left over.
    assert ray_tasks.capacity(8, 0.25) == (16, 0.25)  # Of 64 shares there are CPUs for 16.
    assert ray_tasks.capacity(1, 1 / 3) == (48, 1 / 3)
    nodes((64, 8), (64, 4))
    assert ray_tasks.capacity(4, 8) == (1, 8)
    with pytest.raises(UserError, match="gpus = 16"):
        ray_tasks.capacity(4, 16)
    nodes((4, 0))
    assert ray_tasks.capacity(2, 8) == (2, 0.0)
