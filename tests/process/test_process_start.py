"""What every command does: help without slow imports, Ctrl-C, any text."""

import os
import signal
import subprocess
import sys

import pytest
from ranks import ROOT

COMMANDS = sorted((ROOT / "launch").glob("[!_]*.py"))


def test_help_waits_for_no_library() -> None:
    """But for the demo, which draws, and for Ray's launcher."""
    script = (
        "import os, runpy, sys\n"
        "for path in sys.argv[1:]:\n"
        "    sys.argv, sys.path[0] = [path, '--help'], os.path.dirname(path)\n"
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


def test_ctrl_c_in_the_command_is_an_exception_again() -> None:
    script = (
        "import sys, time; sys.argv = ['x', 'source=a',"
        " 'out=b']\nfrom pipeline.settings.command import main; from pipeline.settings.commands.data import"
        f" ShardConfig\ndef work(config):\n    try: print('ready', flush=True); {SLEEPING}\n    finally: print('tidied"
        " up')\nmain(ShardConfig, work, '')"
    )
    assert interrupt(script, "ready") == (130, "tidied up\nstopped: to go on, run the same command again\n")


@pytest.mark.parametrize("end", [["--config"], ["--config=nowhere.yaml"]])
def test_ray_run_reads_a_command_as_the_command_itself_does(end: list[str]) -> None:
    command = [sys.executable, "launch/ray_run.py", "launch/pretrain.py", "name=x", *end]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--config: expected one argument" in done.stderr or "nowhere.yaml: no such config file" in done.stderr


def test_any_text_can_be_printed() -> None:
    script = "from pipeline.process.start import print_any_text; print_any_text(); print('caf\\udce9 \u00b1')"
    for encoding, said in (("utf-8:strict", "caf\\udce9 \u00b1\n"), ("ascii:strict", "caf\\udce9 \\xb1\n")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, check=True
        )
        assert done.stdout.decode() == said
