"""A command that waits for an object store prints what it waits for; failed requests are retried for a limited time."""

import time

import pytest

from pipeline.data.storage.retry import Retry, StorageError
from pipeline.process import waits


@pytest.fixture(autouse=True)
def short_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(waits, "_board", waits._Board())


def slow() -> str:
    time.sleep(0.3)
    return "content"


def test_a_wait_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    retry = Retry(seconds=600, setting="data.retry_minutes")
    assert [retry.call(f"s3://bucket/{name}", slow) for name in "xyz"] == ["content"] * 3
    assert capsys.readouterr().err == "waiting for s3://bucket/x, at most 10 min (data.retry_minutes)\n"


def test_an_answer_in_time_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    retry = Retry()
    assert retry.call("s3://bucket/x", lambda: 1) == 1

    def missing() -> None:
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        retry.call("s3://bucket/x", missing)
    retry.call("s3://bucket/x", slow, is_transfer=True)
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_a_transfer_is_mentioned_once_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    failures = [OSError("503"), OSError("503")]

    def upload() -> None:
        if failures:
            raise failures.pop()

    Retry().call("s3://bucket/x", upload, is_transfer=True)
    assert capsys.readouterr().err == "waiting for s3://bucket/x, at most 10 min\n"


def test_one_rank_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("Couldn't resolve host name")

    monkeypatch.setenv("RANK", "1")
    with pytest.raises(StorageError):
        Retry(seconds=0.3).call("s3://bucket/x", fail)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(StorageError, match=r"x was unreachable for 0.005 minutes: Couldn't"):
        Retry(seconds=0.3).call("s3://other/x", fail)
    assert capsys.readouterr().err.startswith("waiting for s3://other/x, at most 0 s")


def test_an_impossible_endpoint_is_not_retried() -> None:
    """The message is pyarrow's of `?endpoint_override=foo bar`; it was retried for ten minutes."""
    retry = Retry(seconds=600)

    def fail() -> None:
        raise OSError(
            "When getting information for key 'x' in bucket 'b': AWS Error VALIDATION during HeadObject operation: Invalid DNS Label "
            "found in URI host"
        )

    with pytest.raises(StorageError, match="no valid URL can be made of the bucket's name and the endpoint"):
        retry.call("s3://b/x", fail)
    assert retry.retries == 0
