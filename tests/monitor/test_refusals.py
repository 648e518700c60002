"""What is said of an MLflow store."""

import errno
import io
import os
import sys

import pytest

from pipeline.monitor.mlflow.refusals import warn


class Lost(io.StringIO):
    """A terminal that was closed, or a pipe without a reader."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


def test_a_warning_that_nobody_can_read_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ended the thread that sends to MLflow."""
    closed = io.StringIO()
    closed.close()
    for stream in (Lost(errno.EPIPE), Lost(errno.EIO), closed):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            warn("the server is away")
    warn("the server is away")
    assert capfd.readouterr().err == "warning: the server is away\n"
