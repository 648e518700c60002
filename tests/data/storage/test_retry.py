"""A command that waits for an object store prints what it waits for; failed requests are retried for a limited time."""

import time

import pytest

from pipeline.data.storage.retry import Retry, StorageError


def slow() -> str:
    time.sleep(0.3)
    return "content"


def test_a_wait_for_the_first_answer_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = Retry(seconds=600, setting="data.retry_minutes", notice_seconds=0.1)
    assert [waiting.call("s3://bucket/x", slow) for _ in range(3)] == ["content"] * 3
    said = (
        "waiting for s3://bucket/x: no answer yet; requests are retried for at most 10 minutes (data.retry_minutes)\n"
    )
    assert capsys.readouterr().err == said


def test_an_answer_in_time_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = Retry(notice_seconds=0.1)
    assert waiting.call("s3://bucket/x", lambda: 1) == 1
    waiting = Retry(notice_seconds=0.1)

    def missing() -> None:
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        waiting.call("s3://bucket/x", missing)
    waiting.call("s3://bucket/x", slow)
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_one_rank_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("Couldn't resolve host name")

    monkeypatch.setenv("RANK", "1")
    with pytest.raises(StorageError):
        Retry(seconds=0.3, notice_seconds=0.1).call("s3://bucket/x", fail)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(StorageError, match=r"x was unreachable for 0.005 minutes: Couldn't"):
        Retry(seconds=0.3, notice_seconds=0.1).call("s3://bucket/x", fail)
    assert capsys.readouterr().err.startswith("waiting for s3://bucket/x: no answer yet")
