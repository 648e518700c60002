"""What a person sees of a run, and what happens when nobody looks any more."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_launcher_that_died_does_not_end_the_run(tmp_path: Path) -> None:
    """Its end of the pipes is closed; what the run says is in log.txt all the same."""
    code = (
        "import sys; from pathlib import Path; from pipeline.process.console import Console\n"
        "console = Console(Path(sys.argv[1]), True)\n"
        "sys.stdin.read()\n"
        "for line in ('one', 'two'): console.say(line)\n"
        "print('three', file=sys.stderr, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log.txt")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    for pipe in (process.stdout, process.stderr, process.stdin):
        pipe.close()
    assert process.wait(300) == 0
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["one", "two"]
