"""The first half second of a command: closed streams, and Ctrl-C during the imports."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT

COMMANDS = sorted((ROOT / "launch").glob("*.py"))


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_every_command_is_guarded_before_it_imports_anything(path: Path) -> None:
    imports = re.findall(r"^(?:from|import) (\S+)", path.read_text(), re.MULTILINE)
    ours = [name for name in imports if name.split(".")[0] in ("pipeline", "data_tools")]
    assert ours[0] == "pipeline.process.start"
    assert re.search(r"^guard\(__name__\)$", path.read_text(), re.MULTILINE)
    assert not [
        name for name in imports if name.split(".")[0] not in (*sys.stdlib_module_names, "pipeline", "data_tools")
    ]


def test_help_waits_for_no_library() -> None:
    """But for the demo, which draws, and for Ray's launcher."""
    script = (
        "import runpy, sys\n"
        "for path in sys.argv[1:]:\n"
        "    sys.argv = [path, '--help']\n"
        "    try: runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit: print('done', path)\n"
        "print(sorted({'torch', 'numpy', 'pyarrow', 'matplotlib', 'cv2', 'ray', 'mlflow'} & sys.modules.keys()))\n"
    )
    paths = [str(path) for path in COMMANDS if path.name not in ("demo.py", "ray_run.py")]
    said = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True, cwd="/")
    lines = said.stdout.splitlines()
    assert [f"done {path}" for path in paths] == [line for line in lines if line.startswith("done ")]
    assert lines[-1] == "[]"


def interrupt(script: str, when: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a script in Python, send SIGINT once it prints `when`; (exit code, what it said besides)."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )
    assert process.stdout.readline().strip() == when
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=3000)  # Ends its standard input.
    return process.returncode, out + err


# In short pieces: Python handles a signal between two calls, and one that comes right before a long sleep waits until
# that ends.
SLEEPING = "all(time.sleep(0.01) is None for _ in range(60_000))"
IMPORTING = (
    f"from pipeline.process.start import guard; guard('__main__'); print('ready', flush=True); import time; {SLEEPING}"
)


def test_ctrl_c_during_the_imports_is_one_line() -> None:
    assert interrupt(IMPORTING, "ready") == (130, "stopped: to go on, run the same command again\n")
    assert interrupt(IMPORTING, "ready", {"RANK": "3"}) == (130, "")


@pytest.mark.slow
def test_ctrl_c_that_is_ignored_stays_so() -> None:
    script = "import signal; signal.signal(2, signal.SIG_IGN); " + IMPORTING.replace(
        SLEEPING, "sys.stdin.read()"
    ).replace("import time", "import sys")
    assert interrupt(script, "ready") == (0, "")


def test_ctrl_c_in_the_command_is_an_exception_again() -> None:
    script = (
        "import sys, time; from pipeline.process.start import guard; guard('__main__'); sys.argv = ['x', 'source=a',"
        " 'out=b']\nfrom pipeline.settings.command import main; from pipeline.settings.commands.data import"
        f" ShardConfig\ndef work(config):\n    try: print('ready', flush=True); {SLEEPING}\n    finally: print('tidied"
        " up')\nmain(ShardConfig, work, '')"
    )
    assert interrupt(script, "ready") == (130, "tidied up\nstopped: to go on, run the same command again\n")


@pytest.mark.parametrize("module", ["argparse", "pipeline.settings.run"])
def test_a_real_command_that_is_interrupted_early(module: str, tmp_path: Path) -> None:
    """By itself, when it imports a module: from outside it might be met late, or have ended."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(name, *rest):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt)\n"
    )
    command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), "--help"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "stopped: to go on, run the same command again\n")


def test_little_is_imported_before_ctrl_c_is_handled() -> None:
    """A Ctrl-C in these imports shows a traceback: ctypes alone took 20 of 22 ms."""
    script = (
        "import sys; before = set(sys.modules); from pipeline.process import start; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"ctypes", "select", "shutil", "json", "argparse", "typing"} & set(done.stdout.split())


@pytest.mark.parametrize("end", [["--config"], ["--config=nowhere.yaml"]])
def test_ray_run_reads_a_command_as_the_command_itself_does(end: list[str]) -> None:
    command = [sys.executable, "launch/ray_run.py", "launch/pretrain.py", "name=x", *end]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--config: expected one argument" in done.stderr or "nowhere.yaml: no such config file" in done.stderr


def test_any_text_can_be_printed() -> None:
    script = "from pipeline.process.start import guard; guard('__main__'); print('caf\\udce9 \u00b1')"
    for encoding, said in (("utf-8:strict", "caf\\udce9 \u00b1\n"), ("ascii:strict", "caf\\udce9 \\xb1\n")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, check=True
        )
        assert done.stdout.decode() == said
