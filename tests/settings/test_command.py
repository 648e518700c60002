"""How a command ends: one line and 2 for a mistake of the user, a traceback for one of ours."""

import ast
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import ROOT

from pipeline.base.errors import CrashError, OneRankError, UserError
from pipeline.base.files import replacing
from pipeline.process.launcher import VARIABLES, forget_launcher
from pipeline.settings import command
from pipeline.settings.command import main
from pipeline.settings.commands.data import ShardConfig


def run(
    function: Callable[[ShardConfig], object], monkeypatch: pytest.MonkeyPatch, *arguments: str, rank: str = ""
) -> None:
    monkeypatch.setattr(sys, "argv", ["shard.py", *arguments])
    if rank:
        monkeypatch.setenv("RANK", rank)
    else:
        monkeypatch.delenv("RANK", raising=False)
    main(ShardConfig, function, "About.", by_launcher=True)


def ending(
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str = "",
    code: int = 2,
) -> str:
    """What is printed to standard error before the exit with this code."""

    def fail(config: ShardConfig) -> None:
        raise error

    with pytest.raises(SystemExit) as stop:
        run(fail, monkeypatch, "source=a", "out=b", rank=rank)
    assert stop.value.code == code
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


def test_settings_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[ShardConfig] = []
    file = tmp_path / "shard.yaml"
    file.write_text("source: a\nseed: 3\n")
    # Settings before and after --config, and the rank that the deepspeed launcher adds.
    run(seen.append, monkeypatch, "--local_rank=1", "out=b", "--config", str(file), "seed=4")
    assert (seen[0].source, seen[0].out, seen[0].seed) == ("a", "b", 4)


def test_a_command_that_is_no_rank_ignores_what_a_launcher_left_in_the_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With RANK=1, it ended with code 2 and not a word."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "argv", ["shard.py", "source=a", "out=b"])
    inherited: list[str] = []

    def fail(config: ShardConfig) -> None:
        inherited.extend(os.environ.keys() & set(VARIABLES))
        raise UserError("wrong.")

    with pytest.raises(SystemExit) as stop:
        main(ShardConfig, fail, "About.")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: wrong.\n"
    assert not inherited
    of_ranks = {file.stem for file in (ROOT / "launch").glob("*.py") if "by_launcher=True" in file.read_text()}
    assert of_ranks == {"pretrain", "finetune"}


@pytest.mark.parametrize("command", ["supervise.py -- deepspeed", "ray_run.py"])
def test_commands_that_start_ranks_are_none(command: str) -> None:
    """They said nothing either, and ranks of deepspeed waited for the store of a torchrun that was not theirs."""
    left = {"RANK": "1", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    words = f"launch/{command} launch/pretrain.py --config missing.yaml".split()
    ended = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, **left}, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: missing.yaml")


def test_a_launcher_that_a_command_starts_gets_what_is_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    forget_launcher(starts_one=True)
    assert os.environ.keys() & set(VARIABLES) == {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def test_two_files_of_settings_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They are not merged: the second once took the place of the first without a word."""
    with pytest.raises(SystemExit) as stop:
        run(print, monkeypatch, "--config", "a.yaml", "--config=b.yaml")
    assert stop.value.code == 2
    assert "--config is given 2 times (a.yaml, b.yaml). Give one file" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--vall_share=0.1"], ["--vall_share", "0.1"]])
def test_a_setting_with_dashes_is_one_line(given: list[str], monkeypatch, capsys) -> None:
    """argparse printed its usage, and called the settings after it unrecognised."""
    with pytest.raises(SystemExit) as stop:
        run(print, monkeypatch, "source=a", *given, "out=b")
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {given[0]}")
    assert line.count("\n") == 1


def test_the_subject_may_be_a_plain_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ShardConfig] = []
    monkeypatch.setattr(sys, "argv", ["x.py", "photos", "out=b"])
    main(ShardConfig, seen.append, "About.", subject="source")
    monkeypatch.setattr(sys, "argv", ["x.py", "out=b", "source=photos"])
    main(ShardConfig, seen.append, "About.", subject="source")
    assert [config.source for config in seen] == ["photos", "photos"]


def test_one_setting_may_be_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ShardConfig] = []
    for arguments in (["--source", "photos", "out=b"], ["out=b", "--source=photos"], ["out=b", "source=photos"]):
        monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
        main(ShardConfig, seen.append, "About.")
    assert [config.source for config in seen] == ["photos"] * 3


def test_a_switch_may_be_given_as_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ShardConfig] = []
    for arguments in (["source=a", "--to_rgb8", "out=b"], ["source=a", "out=b"]):
        monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
        main(ShardConfig, seen.append, "About.")
    assert [config.to_rgb8 for config in seen] == [True, False]


def test_a_mistake_of_the_user_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(UserError("this is wrong"), monkeypatch, capsys) == "error: this is wrong\n"
    assert ending(UserError("two\nlines"), monkeypatch, capsys) == "error: two lines\n"


_NAMELESS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)  # Also of a pipe or a socket.
_REFUSED = (errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)


@pytest.mark.parametrize(
    ("number", "path", "code"),
    [
        *((number, "", 2) for number in _NAMELESS),
        *((number, "/data/x", 2) for number in (errno.ENOSPC, *_REFUSED)),
        *((number, "/data/x", 1) for number in (errno.EIO, errno.ESHUTDOWN, errno.ESTALE)),
    ],
)
def test_what_the_system_refuses_is_one_line(
    number: int, path: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk or a server that fails has code 1: after 2, a supervisor, a study and a Kubernetes job would not start a
    run again.
    """
    printed = ending(OSError(number, "as the system says it", path or None), monkeypatch, capsys, code=code)
    assert (printed.startswith("error: "), path in printed, printed.count("\n")) == (True, True, 1)


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_folder_that_vanishes_before_or_while_it_is_written_to_is_one_line(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where its disk is unmounted, which leaves nothing, or the empty folder that it was mounted on."""
    (folder := tmp_path / "out").mkdir()

    def write() -> None:
        if when == "before":
            folder.rmdir()
        with replacing(folder / "x.tar"):
            shutil.rmtree(folder)
            folder.mkdir()

    with pytest.raises(FileNotFoundError) as error:
        write()
    printed = ending(error.value, monkeypatch, capsys)
    assert printed.startswith(f"error: {folder}/x.tar: it was removed while it was written, or its folder was")
    assert printed.count("\n") == 1


def test_a_reader_that_has_gone_is_no_traceback(tmp_path: Path) -> None:
    """As `launch/samples.py ... | head` ends; also when the last lines are still in the buffer."""
    for lines in (1, 100_000):
        script = (
            "import sys; sys.argv = ['x.py', 'source=a', 'out=b']; from pipeline.settings.command import main; "
            "from pipeline.settings.commands.data import ShardConfig; "
            f"main(ShardConfig, lambda config: [print('line') for _ in range({lines})], '')"
        )
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize(
    "error",
    [
        KeyError("ours"),
        ValueError("ours"),
        FileNotFoundError(2, "ours", "x"),
        OSError(errno.EIO, "ours"),
        OSError(errno.EISDIR, "ours"),
        PermissionError(1, "ours"),
    ],
)
def test_a_mistake_of_ours_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: ShardConfig) -> None:
        raise error

    with pytest.raises(type(error), match="ours"):
        run(fail, monkeypatch, "source=a", "out=b")


def test_one_rank_speaks_for_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A launcher ends all ranks when the first has ended: a silent one must not be the first, or nothing would be
    said.
    """
    slept: list[float] = []
    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=slept.append))
    assert ending(UserError("wrong"), monkeypatch, capsys, rank="0") == "error: wrong\n"
    assert not slept
    assert ending(UserError("wrong"), monkeypatch, capsys, rank="3") == ""
    assert ending(CrashError("lost"), monkeypatch, capsys, rank="3", code=1) == ""
    assert slept == [command.SILENT_SECONDS] * 2


def test_a_silent_rank_ends_by_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=interrupted))
    assert ending(UserError("wrong"), monkeypatch, capsys, rank="3") == ""


def test_what_only_one_rank_knows_it_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(OneRankError("bad samples"), monkeypatch, capsys, rank="3") == "error on rank 3: bad samples\n"
    full = OSError(errno.ENOSPC, "No space left on device", "/local/x")
    assert ending(full, monkeypatch, capsys, rank="3").startswith("error on rank 3: No space left for /local/x")


def test_a_module_that_a_command_names_has_a_function_run_for_its_settings() -> None:
    """Neither mypy nor an import checks a name that is a text."""
    named = {}
    for file in (ROOT / "launch").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            arguments = getattr(node, "args" if isinstance(node, ast.Call) else "elts", None) or [None]
            match arguments:
                case [ast.Name(settings), ast.Constant(str(module)), *_] if module.startswith(
                    ("pipeline.", "data_tools.")
                ):
                    named[module] = settings
    assert len(named) > 10
    for module, settings in named.items():
        written = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body
        (function,) = [node for node in written if isinstance(node, ast.FunctionDef) and node.name == "run"]
        first, *others = function.args.args
        assert isinstance(first.annotation, ast.Name), module
        assert first.annotation.id == settings, module
        assert len(others) <= len(function.args.defaults), module
