"""What is said of an MLflow store."""

import errno
import io
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipeline.monitor.export import warn
from pipeline.monitor.mlflow.connection import connect, is_refusal


class Failing:
    """A web server whose MLflow behind it fails: it answers each request with one status and a page. requests: what it
    was asked.
    """

    def __init__(self) -> None:
        self.status, self.requests = 504, list[str]()
        failing = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                failing.requests.append(self.path)
                self.send_response(failing.status)
                self.end_headers()
                self.wfile.write(b"<html>an error page</html>")

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    server = Failing()
    yield server
    server.server.shutdown()
    server.server.server_close()


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


def test_a_request_whose_answer_was_lost_is_not_made_again_unseen(failing: Failing) -> None:
    """MLflow's client made it again by itself: two runs, one of them empty and running for ever."""
    with pytest.raises(Exception, match="504"):
        connect(failing.url).create_run("1")
    assert len(failing.requests) == 1


def test_a_request_that_is_too_large_is_a_refusal(failing: Failing) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.utils.request_utils import augmented_raise_for_status
    from requests import HTTPError, Response

    failing.status = 413
    with pytest.raises(MlflowException) as of_metrics:
        connect(failing.url).set_tag("1" * 32, "a", "tag")
    (response := Response()).status_code = 413
    with pytest.raises(HTTPError) as of_a_file:
        augmented_raise_for_status(response)
    assert is_refusal(of_metrics.value)
    assert is_refusal(of_a_file.value)
    failing.status, response.status_code = 503, 503
    with pytest.raises(MlflowException) as of_metrics:
        connect(failing.url).set_tag("1" * 32, "a", "tag")
    with pytest.raises(HTTPError) as of_a_file:
        augmented_raise_for_status(response)
    assert not is_refusal(of_metrics.value)
    assert not is_refusal(of_a_file.value)
