"""Connects to a Ray cluster, or starts one on this machine.

Ray reads its environment when it is imported, and the import takes a second, so functions import it.
"""

import json
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.words import on_one_line
from pipeline.data.storage.bucket import AnyPath, BucketPath, is_utf8, to_path
from pipeline.process import waits
from pipeline.settings.quantities import whole_number

_ROOT = Path(__file__).resolve().parents[2]
# Timeout of a connection to the head node, in seconds.
_CONNECT_SECONDS = 5.0
# How long a node of this machine may take to start, in seconds; Ray's 30 are too few on a busy machine.
_START_SECONDS = 120
# The variable, JSON, that tells the command of `ray job submit` about its job.
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def shared_path(name: str, value: str) -> AnyPath:
    """The absolute path of the setting `name`.

    Raises UserError for a relative one under `ray job submit --working-dir`, and for one that is not UTF-8.
    """
    path = to_path(value)
    if isinstance(path, BucketPath):
        return path
    job = json.loads(os.environ.get(_JOB) or "{}")
    if "working_dir" in (job.get("runtime_env") or {}) and not path.is_absolute():
        raise UserError(
            f"{name} = {value} is a relative path, but under `ray job submit` the job runs in a temporary copy of this "
            f"folder. Give an absolute path on storage that all nodes share: {name}=/..."
        )
    absolute = path.resolve()
    if not is_utf8(str(absolute)):
        raise UserError(f"{name} = {value}: {absolute} is not UTF-8, as Ray and Parquet require. Rename its folders.")
    return absolute


def connect(num_cpus: int = 0) -> int:
    """Join the cluster of RAY_ADDRESS or `ray job submit`, else start one on this machine. Returns its number of CPUs.

    num_cpus: size of a cluster that is started here; 0 is all CPUs. SIGTERM to this process is as Ctrl-C from here on.
    Raises UserError when the cluster cannot be reached, or started.
    """
    _prepare_environment()
    _check_reachable(os.environ.get("RAY_ADDRESS", ""))
    import ray

    if not ray.is_initialized():
        where, options = "the cluster of this job", dict[str, Any]()
        if _JOB in os.environ:
            pass  # Every worker has this library: the job's working_dir is this repository, or it is installed.
        elif os.environ.get("RAY_ADDRESS"):
            where = "the cluster of RAY_ADDRESS"
            options = {"runtime_env": {"py_modules": [str(_ROOT / "pipeline"), str(_ROOT / "data_tools")]}}
        else:
            where = "this machine"
            # "local", because Ray would otherwise join a cluster that `ray start` left running, and refuse the other
            # options.
            options = {
                "address": "local",
                "num_cpus": num_cpus or None,
                "include_dashboard": False,
                "object_store_memory": 256 * 2**20,
            }
        try:
            # A process of Ray that dies meanwhile ends this one by a line of Ray's library: ours says what it was
            # about.
            with waits.waiting(f"Ray to start on {where}", _START_SECONDS):
                ray.init(logging_level="ERROR", log_to_driver=False, **options)
        except SystemExit as error:
            if error.code != signal.SIGTERM:
                raise
            # Ray's handler of SIGTERM exits with the signal's number, without a word.
            raise KeyboardInterrupt from None
        except Exception as error:  # Ray raises a bare one when its node does not start in time.
            raise UserError(
                f"Ray did not start on {where}: {on_one_line(error)[:600] or type(error).__name__} Run the same command"
                " again when the machine is less busy, check RAY_ADDRESS, or set RAY_TMPDIR to another folder (a short"
                " path, free space), where Ray writes its logs."
            ) from None
    # As for Ctrl-C. Ray's own handler aborts the process after 3 s, while it waits for the tasks that it cancels.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return int(ray.cluster_resources().get("CPU", 1))


def disconnect() -> None:
    """Leave the cluster, and end it if it was started here; otherwise it takes processor time until this process
    exits.
    """
    import ray

    ray.shutdown()


def capacity(num_cpus: int, gpus: float) -> tuple[int, float]:
    """Returns (number of tasks that fit at a time, GPUs of each task).

    num_cpus: CPUs of a task. gpus: GPUs of a task, or a share of one, if the cluster has any. Raises UserError when no
    node can run one.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_gpus = gpus if any(node.get("GPU") for node in nodes) else 0.0

    def fitting(node: dict[str, float]) -> int:
        by_cpu = int(node.get("CPU", 0) // num_cpus)
        if not num_gpus:
            return by_cpu
        have = int(node.get("GPU", 0))  # Shares of one GPU, or whole ones.
        return min(by_cpu, have * int(1 / num_gpus + 1e-6) if num_gpus < 1 else int(have // num_gpus))

    if not (total := sum(map(fitting, nodes))):
        raise UserError(
            f"threads = {num_cpus}, gpus = {num_gpus:g}: no node of this cluster has so many CPUs and GPUs."
        )
    return total, num_gpus


def _prepare_environment() -> None:
    """Set the variables that Ray and its workers read; a cluster on this machine inherits them."""
    # When several tasks fail, we report the first error; Ray would print tracebacks of the others.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    if _JOB in os.environ or os.environ.get("RAY_ADDRESS"):
        return
    # Without a token in the environment, Ray writes one into the home folder, which every later cluster then requires.
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(_START_SECONDS))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))


def _check_reachable(address: str) -> None:
    """Raise UserError when nothing listens at RAY_ADDRESS. Ray itself would print warnings for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    number = whole_number(port)
    if number is None:
        return  # "auto" or "local", which Ray resolves.
    try:
        socket.create_connection((host.strip("[]"), number), _CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"RAY_ADDRESS = {address[:200]}: there is no Ray cluster ({error}). Start one (ray start --head), give the"
            " address of its head node, or unset RAY_ADDRESS to use this machine alone."
        ) from None


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
