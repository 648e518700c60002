"""Packages for a GPU machine without a network: `bring.py FOLDER [3.12]`.

Downloads wheels for x86-64 Linux and a version of Python, in this environment's versions: what the library imports and
all that needs, but for large packages that a machine with PyTorch has. `make gpu` installs them there.
"""

import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

# What training, evaluation and their tests import. Ray is not needed on one machine.
_NEEDED = (
    "deepspeed",
    "webdataset",
    "mlflow",
    "safetensors",
    "xxhash",
    "google-crc32c",
    "simplejpeg",
    "turbojpeg",
    "pi_heif",
    "pyyaml",
    "tqdm",
    "psutil",
    "hypothesis",
    "pytest",
    "pytest-timeout",
)
_PRESENT = {
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "scikit-learn",
    "matplotlib",
    "pillow",
    "h5py",
    "opencv-python-headless",
    "fonttools",
    "contourpy",
    "kiwisolver",
    "setuptools",
    "ninja",
}
# Of MLflow's server, which is not started there, and of other services.
_UNUSED = {"docker", "gunicorn", "waitress", "huey", "skops", "aiohttp", "flask-cors", "graphene"}
_LIMIT = 60 * 2**20


def fetch(folder: Path, python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(_closure()):
        wanted = f"{name}=={metadata.version(name)}"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        if name == "deepspeed":  # Only its source is published; without prebuilt kernels its wheel fits any Python.
            command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), wanted]
        else:
            platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014")]
            only = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", *platforms]
            command = [*pip, "download", *only, "--dest", str(folder), wanted]
        if subprocess.run(command).returncode:
            sys.exit(f"error: {wanted} has no wheel for Python {python}, see above")
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB")
    if size > _LIMIT:
        sys.exit(f"error: more than {_LIMIT >> 20} MiB")


def _closure() -> set[str]:
    """Names of the packages to bring."""
    found: set[str] = set()
    ahead = list(_NEEDED)
    while ahead:
        name = re.sub(r"[-_.]+", "-", ahead.pop()).lower()
        if name in found | _PRESENT | _UNUSED:
            continue
        with suppress(metadata.PackageNotFoundError):  # Of another system.
            needed = metadata.requires(name) or []
            found.add(name)
            ahead += [re.match(r"[\w.-]+", line)[0] for line in needed if "extra ==" not in line]  # type: ignore[index]
    return found


if __name__ == "__main__":
    fetch(Path(sys.argv[1]), *(sys.argv[2:] or ["3.12"]))
