"""Checks a run's hosts before the start (versions, paths, GPUs) and writes DeepSpeed's environment file.

`python -m pipeline.cluster.host_check` runs on each host over ssh; it imports neither torch nor DeepSpeed.
"""

import fnmatch
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import replacing
from pipeline.base.words import counted
from pipeline.settings import schema
from pipeline.settings.commands.operate import HostsConfig
from pipeline.settings.run import LaunchConfig, RunConfig

_ENVIRONMENT_FILE = Path(".deepspeed_env")  # DeepSpeed's launcher reads it from its working directory.
_PACKAGES = ("torch", "deepspeed", "numpy", "pyarrow")
# Timeout of a host's answer: one whose disks hang accepts the connection but never answers.
_ANSWER_SECONDS = 120.0
# Begins the line of a host's answer.
_ANSWER = b"host_check: "


def run(config: HostsConfig) -> None:
    """Write `.deepspeed_env` and check every host. Raises UserError if a check fails."""
    slots = read_hostfile(Path(config.hostfile))
    of_run = schema.load(RunConfig, config.run, config.settings)
    carried = write_environment(of_run.launch)
    print(f"{_ENVIRONMENT_FILE}: {', '.join(carried) or 'nothing'} will reach every host")
    out = Path(of_run.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    data = [of_run.data.path, *(entry.path for entry in of_run.data.mix)]
    paths = [str(Path(path).resolve()) for path in data if "://" not in path]
    with TemporaryDirectory(prefix=".is-shared-", dir=out) as shared, ThreadPoolExecutor(len(slots)) as pool:
        question = {"paths": [*paths, shared], "out": str(out)}
        answers = dict(zip(slots, pool.map(lambda host: ask(host, question), slots), strict=True))
    unfit = problems(slots, answers)
    for line in unfit:
        print(f"unfit: {line}", file=sys.stderr)
    if unfit:
        raise UserError(
            f"{counted(len(unfit), 'problem')} on {counted(len(slots), 'host')}, above: fix them before starting the"
            " run."
        )
    print(f"{counted(len(slots), 'host')}, {counted(sum(slots.values()), 'slot')}: alike and fit")


def read_hostfile(path: Path) -> dict[str, int]:
    """Read DeepSpeed's hostfile, lines of `name slots=N`. Returns the slots of each host. Raises UserError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the hostfile cannot be read ({error}).") from None
    hosts: dict[str, int] = {}
    for line in lines:
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=([1-9]\d{0,5})", text, re.ASCII)
        if not match or match[1] in hosts:
            raise UserError(
                f"{path}: {line!r} is not a hostfile line: write each host once, as 'name slots=8'; to leave one out,"
                " begin its line with #."
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UserError(f"{path} names no host: write lines as 'name slots=8'.")
    return hosts


def write_environment(launch: LaunchConfig) -> list[str]:
    """Write the variables that DeepSpeed's launcher exports on every host: NAME=value, or local variables matching a
    pattern.

    Returns their names. Only the owner can read the file, because it may contain credentials. Values are escaped for
    the shell and for pdsh (%), because DeepSpeed escapes nothing.
    """
    chosen: dict[str, str] = {}
    for pattern in shlex.split(launch.env):
        name, given, value = pattern.partition("=")
        if given:
            chosen[name] = value
        else:
            chosen.update({n: v for n, v in os.environ.items() if fnmatch.fnmatchcase(n, pattern)})
    if bad := [name for name, value in chosen.items() if "\n" in value]:
        raise UserError(f"launch.env: {bad[0]} holds a line break, which DeepSpeed's file of variables cannot.")
    lines = [f"{name}={shlex.quote(value).replace('%', '%%')}\n" for name, value in sorted(chosen.items())]
    with replacing(_ENVIRONMENT_FILE, mode=0o600) as file:
        file.write("".join(lines).encode())
    return sorted(chosen)


def ask(host: str, question: dict[str, Any]) -> dict[str, Any]:
    """Return one host's `answer`; its only problem is the reason if there is none."""
    there = (
        f"cd {shlex.quote(os.getcwd())} && {shlex.quote(sys.executable)} -m pipeline.cluster.host_check"
        f" {shlex.quote(json.dumps(question))}"
    )
    # pdsh takes ssh's keys and ports from this variable.
    options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *options, host, there]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_SECONDS)
        # A host's shell may print before it, as a greeting in ~/.bashrc does, also without a new line.
        if found := done.stdout.partition(_ANSWER)[2]:
            return json_record.parse(found, dict[str, Any], f"the answer of {host}")
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or [f"ssh: code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"it has not answered within {_ANSWER_SECONDS:g} s"
    except (OSError, ValueError) as error:
        reason = str(error)
    return {"versions": {}, "unfit": [reason], "gpus": 0}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Check this host. versions: to be the same on all hosts. unfit: its problems."""
    unfit = [f"{path} is missing" for path in question["paths"] if not os.path.exists(path)]
    if not os.access(question["out"], os.W_OK):
        unfit.append("has no permission to write to the output folder")
    packages = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "versions": {"python": platform.python_version(), "revision": _revision(), **packages},
        "unfit": unfit,
        "gpus": len(list(Path("/dev").glob("nvidia[0-9]*"))),
    }


def problems(slots: Mapping[str, int], answers: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return one line per problem of a host; versions are compared with the first host that answered."""
    found: list[str] = []
    first = next((host for host, a in answers.items() if a["versions"]), "")
    on_gpus = any(a["gpus"] for a in answers.values())  # Then a host without one has no driver.
    for host, a in answers.items():
        lines = list(a["unfit"])
        for name, version in a["versions"].items():
            if version != (expected := answers[first]["versions"].get(name, version)):
                lines.append(f"{name} is {version}, but {expected} on {first}")
        if on_gpus and a["versions"] and slots[host] > a["gpus"]:
            lines.append(f"slots={slots[host]} in the hostfile, but it has {counted(a['gpus'], 'GPU')}")
        found += [f"{host}: {line}" for line in lines]
    return found


def _revision() -> str:
    """Hash of the library's files, also of its tables; works without git."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*")):
        if file.suffix in (".py", ".yaml", ".css"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    print(_ANSWER.decode() + json.dumps(answer(json.loads(sys.argv[1]))))
