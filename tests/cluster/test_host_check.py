"""What is said of hosts that hang, that lack something, or whose check was killed."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import UserError
from pipeline.cluster import host_check
from pipeline.cluster.host_check import problems, read_hostfile

SLOTS = {"node1": 1, "node2": 1, "node3": 1}
ANSWER: dict[str, Any] = {"versions": {"torch": "1"}, "unfit": [], "gpus": 1}
QUESTION = {"paths": ["/nowhere"], "out": "/tmp"}


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


def test_a_host_that_differs_or_whose_gpus_do_not_answer_is_unfit() -> None:
    others = {"node2": {**ANSWER, "gpus": 0}, "node3": {**ANSWER, "versions": {"torch": "2"}}}
    slots, version = problems(SLOTS, {"node1": ANSWER, **others})
    assert slots.startswith("node2: slots=1 ")
    assert version.startswith("node3: torch is 2, ")
