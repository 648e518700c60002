"""How the images of a command are given: source for files, data for a data set."""

from pathlib import Path


def images(place: object) -> str:
    """The setting of launch/predict.py and its like for a data set, or for anything else."""
    return f"{'data' if (Path(str(place)) / 'dataset.json').is_file() else 'source'}={place}"
