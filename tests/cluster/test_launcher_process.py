"""A rank notices the end of its launcher, and takes nothing else for that. All launchers but one are scripts of the
same names.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from polling import until
from ranks import ROOT, without_mlflow

from pipeline.process.launcher import free_port

# Starts the rest of its command line as a child; like the launchers, it passes on nothing.
_PARENT = "import subprocess, sys\nsubprocess.Popen(sys.argv[1:]).wait()\n"
_RANK = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pipeline.process.launcher import find_launcher
launcher, folder = find_launcher(), Path(sys.argv[2])
(folder / "found").write_text(f"{launcher.name} {launcher.pid}" if launcher else "nothing")
looks = 0
while launcher is None or not launcher.is_gone():
    looks += 1
    (folder / "looks").write_text(str(looks))
    time.sleep(0.02)
(folder / "gone").touch()
"""


class Family:
    """Processes of fake launchers in a folder. A shell line starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("deepspeed", "torchrun", "supervise.py"):
            (folder / name).write_text(_PARENT)
        module = folder / "deepspeed_module" / "deepspeed" / "launcher"
        module.mkdir(parents=True)
        (module / "launch.py").write_text(_PARENT)
        for package in (module, module.parent):
            (package / "__init__.py").touch()
        (folder / "rank.py").write_text(_RANK)
        self.names = {
            "RUNNER": f"{sys.executable} {folder}/deepspeed",
            "LAUNCHER": f"{sys.executable} -u -m deepspeed.launcher.launch",
            "TORCHRUN": f"{sys.executable} {folder}/torchrun",
            "SUPERVISOR": f"{sys.executable} {folder}/supervise.py",
            "RANK": f"{sys.executable} {folder}/rank.py {ROOT} {folder}",
        }
        # The command itself, which finds the real package.
        self.names["DEEPSPEED"] = (
            f"env DS_ACCELERATOR=cpu PYTHONPATH={without_mlflow(folder)} {sys.executable}"
            f" {Path(sys.executable).parent}/deepspeed --num_gpus 1 --master_port {free_port()} --no_python"
            " --no_local_rank"
        )
        # A process whose name is sshd, with a session for each command, as sshd has.
        os.symlink("/bin/bash", folder / "sshd")
        self.names["SSHD"] = f"{folder}/sshd"
        self.environment = {**os.environ, "PYTHONPATH": str(folder / "deepspeed_module"), "LAUNCHER_TEST": str(folder)}

    def start(self, line: str) -> subprocess.Popen:
        """Run a shell line with the names filled in; returns once the rank has looked for its launcher."""
        for name, command in self.names.items():
            line = line.replace(name, command)
        shell = subprocess.Popen(
            ["bash", "-c", line],
            env=self.environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGHUP, signal.SIG_DFL
            ),  # Ignored under nohup, which the launcher respects.
        )
        self.wait_for("found")
        return shell

    def found(self) -> str:
        return (self.folder / "found").read_text().partition(" ")[0]

    def process(self, *words: str) -> psutil.Process:
        """The one whose command line begins with these words; `python` stands for the interpreter."""
        for process in self.all():
            command = process.cmdline()
            if [Path(word).name for word in command[: len(words)]] == list(words):
                return process
        raise AssertionError(words)

    def all(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("LAUNCHER_TEST") == str(self.folder):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_for(self, name: str) -> None:
        until(lambda: (self.folder / name).exists() and (name == "gone" or (self.folder / name).read_text()))

    def looks(self) -> int:
        """How often the rank has looked whether its launcher is gone."""
        file = self.folder / "looks"
        return int((file.exists() and file.read_text()) or 0)

    def stays(self) -> None:
        before = self.looks()
        until(lambda: self.looks() >= before + 2 or (self.folder / "gone").exists())
        assert not (self.folder / "gone").exists()


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path)
    yield family
    for process in family.all():
        with contextlib.suppress(psutil.NoSuchProcess):  # It has ended by itself meanwhile.
            process.kill()


PYTHON = Path(sys.executable).name
RUNNER, LAUNCHER = (PYTHON, "deepspeed"), (PYTHON, "-u", "-m", "deepspeed.launcher.launch")


@pytest.mark.parametrize(
    ("line", "name", "victim", "number"),
    [
        ("RUNNER LAUNCHER RANK", "deepspeed", RUNNER, signal.SIGTERM),
        ("RUNNER LAUNCHER RANK", "deepspeed", RUNNER, signal.SIGKILL),
        ("RUNNER LAUNCHER RANK", "deepspeed", LAUNCHER, signal.SIGKILL),
        ("SUPERVISOR RUNNER LAUNCHER bash -c 'RANK; true'", "deepspeed", RUNNER, signal.SIGTERM),
        pytest.param("DEEPSPEED RANK", "deepspeed", RUNNER, signal.SIGTERM, marks=pytest.mark.slow),
        ("LAUNCHER RANK", "deepspeed.launcher.launch", LAUNCHER, signal.SIGKILL),
        ("TORCHRUN RANK", "torchrun", (PYTHON, "torchrun"), signal.SIGKILL),
        ("SSHD -c 'setsid bash -c \"LAUNCHER RANK; true\"; true'", "the", ("sshd",), signal.SIGKILL),
    ],
)
def test_the_end_of_a_launcher_is_noticed(
    family: Family, line: str, name: str, victim: tuple[str, ...], number: signal.Signals
) -> None:
    shell = family.start(line)
    assert family.found() == name
    family.stays()
    process = family.process(*victim)
    if name in victim:
        assert (family.folder / "found").read_text() == f"{name} {process.pid}"
    process.send_signal(number)
    family.wait_for("gone")
    shell.wait()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("nohup RUNNER LAUNCHER RANK > /dev/null 2>&1 &", "deepspeed"),
        ("setsid RUNNER LAUNCHER RANK &", "deepspeed"),
        ("nohup LAUNCHER RANK > /dev/null 2>&1 &", "deepspeed.launcher.launch"),
        ("setsid TORCHRUN RANK &", "torchrun"),
        ("RANK &", "nothing"),
        ("SUPERVISOR RANK &", "nothing"),
        (
            "SSHD -c 'setsid bash -c \"nohup LAUNCHER RANK > /dev/null 2>&1; true\"; true' &",
            "deepspeed.launcher.launch",
        ),
        ("SSHD -c 'setsid bash -c \"setsid LAUNCHER RANK; true\"; true' &", "deepspeed.launcher.launch"),
    ],
)
def test_the_end_of_a_shell_or_of_a_connection_that_was_to_be_outlived_is_not(
    family: Family, line: str, name: str
) -> None:
    shell = family.start(line)  # Ends while what it started goes on.
    shell.wait()
    assert family.found() == name
    killed = []
    for process in family.all():
        if process.name() in ("sshd", "bash") or "supervise.py" in " ".join(process.cmdline()):
            process.kill()
            killed.append(process)
    until(lambda: not any(map(lives, killed)))
    family.stays()


def test_a_launcher_below_the_first_process_of_a_container_is_no_orphan() -> None:
    """It is a child of PID 1 from the start."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("a process namespace needs root")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pipeline.process.launcher import find_launcher
launcher = find_launcher()
print(launcher.links[-1][1] if launcher else 0, launcher is not None and launcher.is_gone())
"""
    for argv0, pid in (("anything", 0), ("deepspeed", 1)):
        script = f'exec -a {argv0} bash -c \'"$@"; true\' bash "$@"'
        done = subprocess.run(
            [*unshare, "bash", "-c", script, "bash", sys.executable, "-c", code], capture_output=True, text=True
        )
        assert done.stdout == f"{pid} False\n", done.stderr
