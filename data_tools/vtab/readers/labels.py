"""Labels that VTAB derives from the annotations of its structured data sets (google-research/task_adaptation,
data/*.py): a rule for each task, which bears its name. It takes the annotations of an image, or, of dSprites, of all
images.

Distances are compared as float32, as tensorflow_datasets stores them.
"""

from collections.abc import Sequence

import numpy as np

# Names of classes, by task, where the files have none.
NAMES = {
    "clevr_count": [str(count) for count in range(3, 11)],
    "clevr_distance": ["0-8", "8-8.5", "8.5-9", "9-9.5", "9.5-10", "10-100"],
    "kitti_distance": ["0-8 m", "8-20 m", "20-999 m", "none"],
    "dsprites_location": [f"x {first}-{first + 1}" for first in range(0, 32, 2)],
    "smallnorb_azimuth": [f"{degrees} degrees" for degrees in range(0, 360, 20)],
    "smallnorb_elevation": [f"{degrees} degrees" for degrees in range(30, 75, 5)],
}

# Lower ends of the bins, exclusive.
_DEPTH_BINS = np.array([0, 8, 8.5, 9, 9.5, 10], np.float32)
_DISTANCE_BINS = np.array([-100, 8, 20, 999], np.float32)
_NO_VEHICLE = 1000.0
# KITTI's object types are Car, Van, Truck, Pedestrian, ...: the first three are vehicles.
VEHICLES = ("Car", "Van", "Truck")


def clevr_count(depths: Sequence[float]) -> int:
    """3 to 10 objects are labels 0 to 7. depths: as of `clevr_distance`."""
    return len(depths) - 3


def clevr_distance(depths: Sequence[float]) -> int:
    """Bin of the nearest object. depths: third pixel coordinate of each object."""
    return _bin(min(depths), _DEPTH_BINS)


def kitti_distance(distances: Sequence[float]) -> int:
    """Bin of the nearest vehicle; the last bin if there is none. distances: z of cars, vans and trucks, in metres."""
    return _bin(min([*distances, _NO_VEHICLE]), _DISTANCE_BINS)


def dsprites_location(x_position: np.ndarray) -> np.ndarray:
    """32 positions along x, two per label."""
    return x_position // 2


def dsprites_orientation(orientation: np.ndarray) -> np.ndarray:
    """40 orientations, alternately three and two per label."""
    return (orientation // 2.5).astype(np.int64)


def _bin(distance: float, lower_ends: np.ndarray) -> int:
    return int(lower_ends.searchsorted(np.float32(distance))) - 1
