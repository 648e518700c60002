"""Cuts fluorescence fields into tiles with a class for each stain, for configs/study/continue_cpu.yaml.

    python tests/measure/cut_cells.py SOURCE OUT        # OUT/{train,test}/CLASS/*.png, 45 x 45 px, 8 bits

SOURCE: 576 TIFF files of 135 x 135 px, one per channel, named ...tNN-chNsk....tiff, in the folders JUMP and PCAP (two
plates with three and six channels) from github.com/cytomining/CytoDataFrame, BSD-3-Clause. A class is a channel of a
plate. Each field is cut into 3 x 3 tiles; the 45 % with the least contrast of each channel are left out, because most
show no cell. Each tile is scaled by its own 1st and 99.5th percentile: otherwise brightness would give the stain away.
Every fourth position is for testing, with all its channels.
"""

import re
import sys
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

_SIDE = 45


def cut(source: Path, out: Path) -> int:
    """Returns the number of tiles."""
    channels: dict[str, list[tuple[int, np.ndarray]]] = {}
    for path in sorted(source.glob("*/*.tiff")):
        position, channel = map(int, re.search(r"t(\d+)-ch(\d+)sk", path.name).groups())
        channels.setdefault(f"{path.parent.name.lower()}_ch{channel}", []).append((position, tifffile.imread(path)))
    count = 0
    for name, fields in channels.items():
        tiles = [
            (position, number, field[row * _SIDE :, column * _SIDE :][:_SIDE, :_SIDE].astype(float))
            for position, field in fields
            for number, (row, column) in enumerate(np.ndindex(3, 3))
        ]
        least = np.percentile([tile.std() for _, _, tile in tiles], 45)
        for position, number, tile in tiles:
            if tile.std() < least:
                continue
            low, high = np.percentile(tile, [1, 99.5])
            pixels = (np.clip((tile - low) / (high - low), 0, 1) * 255).round().astype(np.uint8)
            folder = out / ("test" if position % 4 == 1 else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).convert("RGB").save(folder / f"{position:02d}-{number}.png")
            count += 1
    return count


if __name__ == "__main__":
    print(f"{cut(*map(Path, sys.argv[1:]))} tiles")
