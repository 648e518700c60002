"""A command that waits for an object store prints what it waits for; failed requests are retried for a limited time."""

import errno
from collections.abc import Callable

import pytest
from polling import until

from pipeline.base.errors import Interrupted
from pipeline.data.storage.retry import Retry
from pipeline.process import waits

Late = Callable[[], str]


@pytest.fixture
def late(notice_after_600: Callable[[float], None]) -> Late:
    """An answer that comes after the time in which a wait is said: once it would have been."""
    said = list[str]()

    def late() -> str:
        what = f"wait {len(said)} of this test"
        with waits.waiting(what, 1.0, say=said.append):  # Begun later than what it is called for, and so said after it.
            notice_after_600(600)
            until(lambda: said and what in said[-1])
        return "content"

    return late


def test_a_wait_is_said_once(late: Late, capsys: pytest.CaptureFixture[str]) -> None:
    retry = Retry(seconds=600, setting="data.retry_minutes")
    assert [retry.call(f"s3://bucket/{name}", late) for name in "xyz"] == ["content"] * 3
    assert capsys.readouterr().err == "waiting for s3://bucket/x, at most 10 min (data.retry_minutes)\n"


@pytest.mark.parametrize("method", [Retry.call, Retry.read_file])
def test_what_is_given_up_is_not_retried(method: Callable[..., None]) -> None:
    retry, attempts = Retry(seconds=600), list[int]()

    def fail() -> None:
        attempts.append(1)
        retry.give_up()
        raise OSError(errno.EIO, "failed")

    with pytest.raises(Interrupted):
        method(retry, "s3://bucket/x", fail)
    assert len(attempts) == 1
