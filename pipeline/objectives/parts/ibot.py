"""Masked image modelling with a teacher (iBOT; Zhou et al., arXiv 2111.07832): which patches of an image the student
does not see.

Of each image one of the two global views is masked, so half of them are. Its masked patches are blocks, as in BEiT:
rectangles of random area and aspect ratio, until a share of the patches is covered that is drawn for each image. All is
drawn from (seed, epoch, sample): the same on any number of ranks and after a restart.

Shapes: B batch, N patches, M largest number of masked patches of an image.
"""

import math
from dataclasses import dataclass

import numpy as np

from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.data.loading.loader import Batch

_BLOCKS, _REST = Purpose.named("ibot_blocks"), Purpose.named("ibot_rest")
# As in DINOv2: smallest block in patches, smallest and largest aspect ratio, tries in a row for a block that adds
# patches.
_LEAST_BLOCK, _ASPECT, _TRIES = 4, (0.3, 1 / 0.3), 10


@dataclass(frozen=True)
class BlockMasks:
    """Draws the masks. grid: (rows, columns) of patches. shares: smallest and largest share of a view's patches that
    are masked.
    """

    grid: tuple[int, int]
    shares: tuple[float, float]
    seed: int

    @property
    def most(self) -> int:
        """M: the largest number of masked patches of an image. All images have this many indices, so that shapes are
        fixed.
        """
        return self._count(self.shares[1])

    def draw(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what is masked of a batch.

        masked: bool (2B, N), the patches that the student sees as the mask token, of all first views and then all
        second ones.
        indices: int64 (B, M), the same patches as places in the 2B * N of both views; an image's last ones repeat if it
        has fewer.
        weights: float32 (B, M), of each index in the mean over its image's masked patches; 0 where it repeats.
        """
        B, N, M = len(batch.rows), math.prod(self.grid), self.most
        masked = np.zeros((2 * B, N), np.bool_)
        indices, weights = np.zeros((B, M), np.int64), np.zeros((B, M), np.float32)
        for i, sample in enumerate(zip(batch.epochs.tolist(), batch.rows.tolist(), strict=True)):
            draw = random_numbers.draws(self.seed, _BLOCKS, *sample)
            row = i if draw(0) < 0.5 else B + i
            least, most = self.shares
            masked[row] = self._mask(*sample, self._count(least + (most - least) * draw(1))).ravel()
            places = np.flatnonzero(masked[row])
            indices[i] = row * N + np.pad(places, (0, M - len(places)), mode="edge")
            weights[i, : len(places)] = 1 / len(places)
        return masked, indices, weights

    def _count(self, share: float) -> int:
        return max(1, int(share * math.prod(self.grid)))

    def _mask(self, epoch: int, sample: int, count: int) -> np.ndarray:
        """bool (rows, columns) with exactly `count` masked patches: blocks, and single patches where no block fits any
        more.
        """
        draw = random_numbers.draws(self.seed, _BLOCKS, epoch, sample)
        (rows, columns), masked = self.grid, np.zeros(self.grid, np.bool_)
        left, tries, number = count, 0, 2
        while left and tries < _TRIES:
            least = min(_LEAST_BLOCK, left)
            area = least + (left - least) * draw(number)
            aspect = _ASPECT[0] * (_ASPECT[1] / _ASPECT[0]) ** draw(number + 1)
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            tries += 1
            if 0 < height < rows and 0 < width < columns:
                top = int((rows - height + 1) * draw(number + 2))
                block = masked[top : top + height, int((columns - width + 1) * draw(number + 3)) :][:, :width]
                added = height * width - int(block.sum())
                if 0 < added <= left:
                    block[:] = True
                    left, tries = left - added, 0
            number += 4
        if left:
            free = np.flatnonzero(~masked)
            order = np.argsort(random_numbers.bits(self.seed, _REST, epoch, sample, free), kind="stable")
            masked.ravel()[free[order[:left]]] = True
        return masked
