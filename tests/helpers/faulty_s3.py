"""A real S3 API on loopback (moto's), in a server that does to requests what networks and servers do."""

import contextlib
import http.client
import io
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from polling import until
from werkzeug.serving import WSGIRequestHandler
from werkzeug.test import run_wsgi_app

from pipeline.data.dataset.mapped_index import INDEX_FOLDER
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import BucketPath, to_path
from pipeline.data.storage.retry import Retry

# (socket to the client, headers of the answer, its body): sends what the client gets, or returns the body to be sent.
Fault = Callable[["_Handler", bytes, bytes], bytes | None]


def reset(handler: "_Handler", head: bytes, body: bytes) -> None:
    """Half of the answer, then the connection is reset."""
    handler.wfile.write(head + body[: len(body) // 2])
    # A reset overtakes what was not read yet; and curl repeats what was not answered at all.
    until(lambda: not _unread(handler.client_address[1]))
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _unread(port: int) -> int:
    """Bytes that have come to a socket of this machine and wait there to be read."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, _, queues, *_ = line.split()
        if local == f"0100007F:{port:04X}":
            return int(queues.partition(":")[2], 16)
    return 0


def truncate(handler: "_Handler", head: bytes, body: bytes) -> None:
    """Half of the answer, then the end."""
    handler.wfile.write(head + body[: len(body) // 2])


def stall(handler: "_Handler", head: bytes, body: bytes) -> None:
    """Half of the answer, then nothing, for longer than anyone waits."""
    handler.wfile.write(head + body[: len(body) // 2])
    handler.server.over.wait()  # type: ignore[attr-defined]


def slow(handler: "_Handler", head: bytes, body: bytes) -> bytes:
    """The answer, late."""
    time.sleep(0.3)
    return body


def flip(handler: "_Handler", head: bytes, body: bytes) -> bytes:
    """The answer with one bit turned."""
    return body[:100] + bytes([body[100] ^ 1]) + body[101:]


def answer(code: int, error: str) -> Fault:
    """An error of S3's."""

    def fault(handler: "_Handler", head: bytes, body: bytes) -> None:
        xml = f"<Error><Code>{error}</Code><Message>{error}</Message></Error>".encode()
        text = b"" if handler.command == "HEAD" else xml
        status = f"HTTP/1.1 {code} {error}\r\nContent-Type: application/xml\r\nContent-Length: {len(text)}\r\n\r\n"
        handler.wfile.write(status.encode() + text)

    return fault


@dataclass
class _Rule:
    fault: Fault
    matches: str
    times: int


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Small pieces of an answer, each acknowledged late, would cost 40 ms a request.
    disable_nagle_algorithm = True

    def _forward(self) -> None:
        s3: S3 = self.server.s3  # type: ignore[attr-defined]
        length = self.headers.get("Content-Length")
        sent = (
            self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(int(length or 0))
        )
        environ = WSGIRequestHandler.make_environ(self)
        for name in ("HTTP_TRANSFER_ENCODING", "HTTP_EXPECT", "wsgi.input_terminated"):
            environ.pop(name, None)
        environ |= {"wsgi.input": io.BytesIO(sent), "CONTENT_LENGTH": str(len(sent))}
        parts, status, answered = run_wsgi_app(s3.moto, environ, buffered=True)
        body = b"".join(parts)
        head = f"HTTP/1.1 {status}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in answered)
        if "Content-Length" not in answered:
            head += f"Content-Length: {len(body)}\r\n"
        raw = head.encode() + b"\r\n"
        if fault := s3.next_fault(f"{self.command} {self.path}"):
            self.close_connection = True
            changed = fault(self, raw, body)
            if changed is None:
                return
            body = changed
        with contextlib.suppress(OSError):
            self.wfile.write(raw + body)

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass

    def port_integer(self) -> int:
        """As werkzeug's handlers have it, one of whose methods is called with this one."""
        return self.client_address[1]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    ssl_context, multithread, multiprocess = None, True, False

    def handle_error(self, *_: object) -> None:
        """Clients go away in the middle; that is what these tests are about."""


class S3:
    """The server. url: of the proxy. requests: `GET /bucket/key` and the like, all there were."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import create_backend_app

        self.moto = create_backend_app("s3")
        self._rules: list[_Rule] = []
        self.requests: list[str] = []
        self._lock = threading.Lock()
        self._proxy = _Server(("127.0.0.1", 0), _Handler)
        self._proxy.s3, self._proxy.over = self, threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._proxy.server_port}"

    def stop(self) -> None:
        self._proxy.over.set()  # type: ignore[attr-defined]
        self._proxy.shutdown()
        self._proxy.server_close()

    def reset(self) -> None:
        """Forget faults and requests."""
        self._rules, self.requests = [], []

    def fail(self, fault: Fault, matches: str = "", times: int = 1_000_000) -> None:
        """Do this to the next requests that contain `matches`."""
        self._rules.append(_Rule(fault, matches, times))

    def next_fault(self, request: str) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.times and rule.matches in request:
                    rule.times -= 1
                    return rule.fault
        return None

    def bucket(self, name: str) -> None:
        """Make a bucket, unless it is there."""
        connection = http.client.HTTPConnection("127.0.0.1", self._proxy.server_port)
        connection.request("PUT", f"/{name}")
        assert connection.getresponse().status == 200
        connection.close()
        self.requests.clear()


@contextlib.contextmanager
def running() -> Iterator[S3]:
    """A server, and the environment that leads to it."""
    s3 = S3()
    settings = {"AWS_ENDPOINT_URL": s3.url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield s3
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        s3.stop()


def put(path: BucketPath, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


def copy_folder(folder: Path, url: str) -> None:
    """The files of a data set's folder, to the bucket, without what readers derive from them."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(f"{INDEX_FOLDER}/"):
            put(bucket_path(f"{url}/{name}"), path.read_bytes())


def bucket_path(url: str, seconds: float = 5.0) -> BucketPath:
    path = to_path(url, Retry(seconds))
    return path
