"""What is said of hosts that hang, that lack something, or whose check was killed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import UserError
from pipeline.cluster import host_check
from pipeline.cluster.host_check import problems, read_hostfile
from pipeline.settings.commands.operate import HostsConfig

SLOTS = {"node1": 1, "node2": 1, "node3": 1}
ANSWER: dict[str, Any] = {"about": "", "versions": {"torch": "1"}, "unfit": [], "gpus": 1}
QUESTION = {"paths": ["/nowhere"], "out": "/tmp", "token": "/tmp"}


@pytest.mark.parametrize("text", ["a", "a slots=1\na slots=2", "a slots=0", ""])
def test_hostfiles_with_a_mistake(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"# in rack 3\n{text}\n")
    with pytest.raises(UserError, match=str(file)):
        read_hostfile(file)
    file.write_text("# in rack 3\na slots=2\n\nb slots=1  # slow\n")
    assert read_hostfile(file) == {"a": 2, "b": 1}


def test_a_host_that_says_nothing_is_named_as_is_a_missing_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ssh" in host_check.ask("node1", QUESTION)["unfit"][0]

    (tmp_path / "ssh").write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr(host_check, "_ANSWER_SECONDS", 0.2)
    (line,) = problems(SLOTS, {"node1": host_check.ask("node1", QUESTION)})
    assert line.startswith("node1: ")
    assert "0.2 s" in line


def test_what_the_shell_of_a_host_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho Welcome\nfor command; do :; done\nexec sh -c "$command"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    unfit = host_check.ask("node1", QUESTION)["unfit"]
    assert ["/nowhere" in line for line in unfit] == [True]


def test_what_a_host_lacks_is_said_of_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_check, "_PACKAGES", ("torch", "no_package"))
    lines = problems(SLOTS, {"node1": host_check.answer(QUESTION)})
    assert lines[0].startswith("node1: no_package ")


def test_a_host_that_differs_or_whose_gpus_do_not_answer_is_unfit() -> None:
    others = {"node2": {**ANSWER, "gpus": 0}, "node3": {**ANSWER, "versions": {"torch": "2"}}}
    slots, version = problems(SLOTS, {"node1": ANSWER, **others})
    assert slots.startswith("node2: slots=1 ")
    assert version.startswith("node3: torch is 2, ")


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

    def killed(host: str, question: dict[str, Any]) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    monkeypatch.setattr(host_check, "ask", killed)
    if (pid := os.fork()) == 0:
        host_check.run(config)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert list((tmp_path / "runs").iterdir())

    def answers(host: str, question: dict[str, Any]) -> dict[str, Any]:
        assert Path(question["token"]).parent == tmp_path / "runs"
        assert Path(question["token"]).exists(), "each host looks whether it sees this"
        return {**ANSWER, "unfit": ["it does not answer"]}

    monkeypatch.setattr(host_check, "ask", answers)
    with pytest.raises(UserError, match="1 problem on 1 host"):
        host_check.run(config)
    assert list((tmp_path / "runs").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"hosts", "run.yaml", "runs", ".deepspeed_env"}
