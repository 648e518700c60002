"""Servers on loopback that tests start: PostgreSQL, `mlflow server`, and a proxy that records who is asked."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from polling import until

from pipeline.process.launcher import free_port


def skip_or_fail(reason: str) -> None:
    """Skip, or fail in CI, which sets REQUIRE_HOSTS because it has installed what is needed."""
    (pytest.fail if os.environ.get("REQUIRE_HOSTS") else pytest.skip)(reason)


# ------------------------------------------------------------------------------------------ PostgreSQL
class Postgres:
    """A PostgreSQL server. Passwords are asked for; `uri(database)` has the one of the user `tracker`."""

    password = "open-sesame-4711"

    def __init__(self, folder: Path) -> None:
        binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
        if not binaries:
            skip_or_fail("PostgreSQL is not installed (Debian: apt-get install postgresql)")
        self.binaries, self.data, self.port = binaries[-1], folder / "data", free_port()
        # PostgreSQL refuses to run as root.
        self.as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if not os.getuid() else []
        self.data.mkdir()
        if self.as_user:
            for parent in self.data.parents:  # pytest's folders are closed to other users.
                if parent.name and parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
                    parent.chmod(parent.stat().st_mode | 0o011)
            shutil.chown(self.data, "postgres", "postgres")
        (password := folder / "password").write_text(self.password)
        password.chmod(0o644)
        self._call("initdb", "-D", self.data, "-U", "tracker", "-A", "scram-sha-256", f"--pwfile={password}", "-N")
        settings = [
            "-F",
            "-c",
            f"port={self.port}",
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "unix_socket_directories=",
        ]
        self.process = subprocess.Popen(
            [*self.as_user, self.binaries / "postgres", "-D", self.data, *settings],
            cwd=self.data,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ready = [self.binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        until(lambda: not subprocess.run(ready).returncode)

    def uri(self, database: str, password: str | None = None) -> str:
        return f"postgresql://tracker:{password or self.password}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """Create an empty database; returns its URI."""
        self.call("createdb", database)
        return self.uri(database)

    def call(self, tool: str, *arguments: str) -> bytes:
        """Run one of PostgreSQL's tools; returns what it prints."""
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "tracker", "-w"]
        command = [self.binaries / tool, *where, *arguments]
        return subprocess.run(
            command, env={**os.environ, "PGPASSWORD": self.password}, check=True, capture_output=True
        ).stdout

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)  # Ends at once, with its connections.
        self.process.wait()

    def _call(self, tool: str, *arguments: Any) -> None:
        command = [*self.as_user, self.binaries / tool, *arguments]
        subprocess.run(command, cwd=self.data, check=True, capture_output=True)


# ------------------------------------------------------------------------------------------ mlflow server
class MlflowServer:
    """`mlflow server` on a port that stays the same when it is stopped and started again. log: what it printed."""

    def __init__(self, folder: Path, store: str, **environment: str) -> None:
        self.port, self.log = free_port(), folder / "server.log"
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            store,
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        # Tests have their own switch in MLflow, which turns off more than ours does.
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTEST_CURRENT_TEST", "CI")}
        # The server's jobs are for language models, and take half of its memory and start-up time.
        jobs = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.environment = {**inherited, **jobs, "MLFLOW_DISABLE_TELEMETRY": "true", **environment}
        self.folder = folder

    def start(self) -> "MlflowServer":
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, cwd=self.folder, env=self.environment, stdout=log, stderr=log)
        until(self._is_up)
        return self

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.url}/health", timeout=60).close()
            return True
        return False

    def stop(self) -> None:
        """End the server and its children at once."""
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, 300)
        self.process.wait()

    def family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]


# ------------------------------------------------------------------------------------------ a proxy that refuses
class Recorder:
    """A proxy server that records which hosts are asked for, and refuses all: where a program would connect to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def record(self) -> None:
                recorder.asked.append(self.path)
                self.send_error(502)

            do_CONNECT = do_GET = do_POST = record  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            name: url for lower in ("http_proxy", "https_proxy", "all_proxy") for name in (lower, lower.upper())
        } | {"no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def running(*servers: Any) -> Iterator[None]:
    """Stop these servers at the end of the block."""
    try:
        yield
    finally:
        for server in servers:
            server.stop()
