"""A worker holds one image at a time: what it needs does not grow with the shard, and little with the image."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from ranks import ROOT
from raw_images import jpeg

MIB = 2**20

# Each program prints by how many bytes the peak of its process's memory grew, and what it is compared with.
_START = """
import sys
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
"""
_SHARD = """
from data_tools.check.verify_shard import VerifyJob, check_shard
from data_tools.sharding.write_shard import ShardingJob, part_path, read_rows, write_shard
from data_tools.sources.listing import SourceImage
from pipeline.settings.commands.data import ShardConfig
from pathlib import Path
image, out, copies = Path(sys.argv[1]), Path(sys.argv[2]), 96
size = image.stat().st_size
keys = [f"class/{i}" for i in range(copies)]
images = [SourceImage(key, [0], key, 0, -1, [(str(image), 0, size, 0)]) for key in keys]
config = ShardConfig(source="", out="", inspect="header")
before = peak()
done = write_shard(ShardingJob(str(image.parent), str(out), "train-000000.tar", "train", images, config, None))
assert done.shard.bytes > copies * size
rows = read_rows(part_path(out, done.shard.name)).to_pydict()
assert len(check_shard(VerifyJob(str(out), done.shard, rows, 0, 1)).findings) == 0
print(peak() - before, done.shard.bytes)
"""
_IMAGE = """
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.data.loading.decode import decode, inspect
with open(sys.argv[1], "rb") as file:
    data = file.read()
before = peak()
pixels = RGB8 if sys.argv[2] == "RGBA" else Pixels.full_range(("x",), "uint16")
decode(data, pixels=pixels)
found = inspect(data)
print(peak() - before, found.width * found.height)
"""


def growth(program: str, *arguments: Path | str) -> tuple[int, int]:
    """What the program printed, run in a process of its own."""
    command = [sys.executable, "-c", _START + program, *map(str, arguments)]
    grown, size = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return int(grown), int(size)


@pytest.mark.slow
def test_a_worker_does_not_hold_its_shard(tmp_path: Path) -> None:
    (tmp_path / "out/.parts").mkdir(parents=True)
    (tmp_path / "image.jpg").write_bytes(jpeg(0, width=1500, height=1500))
    grown, shard = growth(_SHARD, tmp_path / "image.jpg", tmp_path / "out")
    assert shard > 150 * MIB
    assert grown < 100 * MIB  # Half of it is what libraries allocate at first use.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["RGBA", "I;16"])
def test_an_image_costs_at_most_9_bytes_a_pixel(kind: str, tmp_path: Path) -> None:
    image = Image.new(kind, (4000, 4000)).transpose(Image.Transpose.ROTATE_90)
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "large.png", compress_level=1, exif=exif)
    grown, pixels = growth(_IMAGE, tmp_path / "large.png", kind)
    assert grown < 9 * pixels
