"""What is said of hosts that hang, that lack something, or whose check was killed."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import UserError
from pipeline.cluster import host_check
from pipeline.cluster.host_check import problems, read_hostfile
from pipeline.settings.commands.operate import HostsConfig

SLOTS = {"node1": 1, "node2": 1, "node3": 1}
ANSWER = {"versions": {}, "missing": [], "writable": True, "free_bytes": 10**12, "gpus": 0, "cores": 2}


@pytest.mark.parametrize("text", ["a", "a slots=1\na slots=2", "a slots=0", ""])
def test_hostfiles_with_a_mistake(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"# in rack 3\n{text}\n")
    with pytest.raises(UserError, match=str(file)):
        read_hostfile(file)
    file.write_text("# in rack 3\na slots=2\n\nb slots=1  # slow\n")
    assert read_hostfile(file) == {"a": 2, "b": 1}


def test_a_host_that_says_nothing_is_named_as_is_a_missing_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timeout").symlink_to("/usr/bin/timeout")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ssh" in host_check.ask("node1", [], "out")["error"]

    (tmp_path / "ssh").write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr(host_check, "_ANSWER_SECONDS", 0.2)
    assert host_check.ask("node1", [], "out") == {"error": "it accepts ssh, and has not answered within 0.2 s"}


def test_what_the_shell_of_a_host_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho Welcome\nfor command; do :; done\nexec sh -c "$command"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = host_check.ask("node1", ["/nowhere"], str(tmp_path))
    assert found["missing"] == ["/nowhere"]


def test_what_is_installed_on_no_host_is_missing_on_all() -> None:
    answers = [{**ANSWER, "versions": {"python": "3.12", "deepspeed": "missing"}}] * 3
    lines = problems(SLOTS, answers, HostsConfig(hostfile="hosts", run="run.yaml"), "token")
    assert lines == [f"{host}: deepspeed is not installed" for host in SLOTS]


def test_a_host_whose_gpus_do_not_answer_is_unfit_among_others_that_have_some() -> None:
    config = HostsConfig(hostfile="hosts", run="run.yaml")
    answers = [{**ANSWER, "gpus": gpus} for gpus in (1, 0, 8)]
    assert problems(SLOTS, answers, config, "token") == ["node2: slots=1 in the hostfile, but it has 0 GPUs"]


def test_what_a_killed_check_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    run = {
        "name": "x",
        "out": str(tmp_path / "other"),
        "data": {"path": "d"},
        "train": {"length": "9 steps"},
        "model": {"name": "ViT-S/16"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    config = HostsConfig(
        hostfile=str(tmp_path / "hosts"), run=str(tmp_path / "run.yaml"), settings=[f"out={tmp_path / 'runs'}"]
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "..deepspeed_env.0123abcd.tmp").write_text("SECRET=1")

    def killed(host: str, paths: Sequence[str], out: str) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    monkeypatch.setattr(host_check, "ask", killed)
    if (pid := os.fork()) == 0:
        host_check.run(config)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert list((tmp_path / "runs").iterdir())

    def answers(host: str, paths: Sequence[str], out: str) -> dict[str, Any]:
        assert Path(paths[0]).parent == tmp_path / "runs"
        assert Path(paths[0]).exists(), "each host looks whether it sees this"
        return {"error": "it does not answer"}

    monkeypatch.setattr(host_check, "ask", answers)
    with pytest.raises(UserError, match="1 problem on 1 host"):
        host_check.run(config)
    assert list((tmp_path / "runs").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"hosts", "run.yaml", "runs", ".deepspeed_env"}
