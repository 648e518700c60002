"""Draws the figures of a run folder into `page/figures/`, and its mistakes into `page/mistakes/`; a process of its own
beside training:

    python -m pipeline.review.draw RUN_FOLDER [--final]

Curves, the figures of the last evaluation and MAE's reconstructions are drawn each time; attention and position
embeddings, and without labels the patches' components, when the run has ended (--final). A figure that cannot be drawn
costs one line, and not the others.
"""

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.base import npz
from pipeline.base.files import replacing
from pipeline.base.gallery import DPI
from pipeline.base.page import png, report
from pipeline.base.trained_on import TRAINED_BY
from pipeline.base.words import on_one_line
from pipeline.cluster.status_files import read_settings
from pipeline.data.dataset.manifest import Split
from pipeline.data.loading.views import eval_view
from pipeline.data.mixture.run_data import open_run_data
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.cache import Storage
from pipeline.evaluate import mistakes
from pipeline.evaluate.classify import read_shown
from pipeline.evaluate.render import draw_confusion, draw_scatter
from pipeline.explain import explain, galleries
from pipeline.monitor.page_folder import FIGURES, MISTAKES, PAGE
from pipeline.process.committed import checkpoints_of, newest_complete
from pipeline.review.curves import draw_run
from pipeline.review.record import PREDICTIONS, LastPredictions, from_folder
from pipeline.settings import schema
from pipeline.settings.commands.weights import ExplainConfig
from pipeline.settings.run import RunConfig

Files = dict[str, bytes | str | None]
_NUM_EXPLAINED = 4
_NUM_SHOWN = 32
_MAX_SECONDS = 300


def draw(folder: Path, final: bool) -> list[str]:
    """Draw all figures whose inputs exist; returns a line for each that failed. final: also those that need the
    weights.
    """
    problems: list[str] = []
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)

    def attempt(names: tuple[str, ...], make: Callable[[], Iterator[bytes | Files | None]]) -> None:
        try:
            for name, content in zip(names, make(), strict=True):
                if isinstance(content, dict):
                    write_files(folder / PAGE / name, content)
                elif content is not None:
                    with replacing(folder / FIGURES / f"{name}.png") as file:
                        file.write(content)
        except Exception as error:  # Whatever a damaged file, a library or the disk raises.
            problems.append(f"{', '.join(names)} not drawn: {on_one_line(error)[:300] or type(error).__name__}")

    attempt(("curves",), lambda: iter([draw_run(from_folder(folder))]))
    if (folder / PREDICTIONS).exists():
        drawn = ("confusion", "predictions", "scatter", MISTAKES)
        attempt(drawn, lambda: _of_evaluation(folder))
    for names in (("reconstruction",), *[("attention", "positions", "components")] * final):
        attempt(names, partial(_of_weights, folder, *names))
    return problems


def _of_evaluation(folder: Path) -> Iterator[bytes | Files | None]:
    config, file = read_settings(folder), folder / PREDICTIONS
    data = config.data
    if config.labels == "targets":
        # float32 (n, T), true and predicted numbers, NaN for a missing one, and for an unreadable image.
        numbers = npz.read_arrays(file, str(file), ("targets", "values"))
        yield from [None, None, draw_scatter(numbers["values"], numbers["targets"], data.targets), None]
        return
    found = LastPredictions.read(folder)
    opened = open_run_data(
        data, config.seed, config.labels, Storage.create(data.retry_minutes, data.cache, data.cache_gb)
    )
    names, split = opened.dataset.class_names, opened.evaluation
    assert split is not None, "there are predictions of it"
    read = partial(_read_shown, split, config)
    yield draw_confusion(found.true, found.predicted, names)
    # In the crops that the model sees, confident mistakes first, then right ones.
    sheet = None
    if ((found.true >= 0) & (found.predicted >= 0)).any():
        figure = galleries.draw_predictions(found.true, found.predicted, found.probability, names, _NUM_SHOWN, read)
        sheet = png(figure, DPI, split.pixels.describe_shown())
    yield sheet
    yield None
    record = from_folder(folder)
    evaluated = record.dataset("evaluation")
    of_run, pictures = mistakes.find(
        found.true,
        found.predicted,
        found.probability,
        found.of_label,
        names,
        split,
        read,
        mistakes.how_found(split.name, evaluated.notes.get(TRAINED_BY, "") if evaluated else ""),
        data.path,
        data.train_split if data.dev_share else "",  # The split that has its samples in the manifest.
    )
    content = mistakes.blocks(of_run, pictures, folder / PAGE / MISTAKES)
    yield of_run.files(pictures) | report(f"Mistakes of {record.name}", content)


def _read_shown(split: Split, config: RunConfig, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the rows that can be read, the crops that the model sees, uint8 (n, H, W, 3))."""
    view = eval_view(config.augment, config.model.image_size, split.pixels)
    kept, images, _ = read_shown(split, view, rows)
    return kept, images


def _of_weights(folder: Path, *names: str) -> Iterator[bytes | None]:
    config = read_settings(folder)
    data, checkpoints = config.data, checkpoints_of(folder)
    is_local = isinstance(checkpoints, Path) and newest_complete(checkpoints) is not None
    has = {"reconstruction": config.train.loss == "mae" and is_local, "components": not config.needs_labels}
    drawn = [name for name in names if has.get(name, True)]
    # The split "dev" is a part of the training samples, and data.eval_split may then be missing.
    split = data.eval_split if data.eval_split and not data.dev_share else data.train_split
    with tempfile.TemporaryDirectory() as out:
        settings = [
            f"weights={folder}",
            f"data={json.dumps(data.path)}",
            f"split={split}",
            f"draw=[{','.join(drawn)}]",
            f"out={out}",
            f"num_drawn={_NUM_EXPLAINED}",
            "device=cpu",
            "threads=1",
        ]
        if drawn:
            explain.run(schema.load(ExplainConfig, None, settings), skip=True)
        for name in names:
            file = Path(out) / f"{name}.png"
            yield file.read_bytes() if file.exists() else None


if __name__ == "__main__":
    signal.alarm(_MAX_SECONDS)  # Training ends it earlier, unless training was killed.
    for line in draw(Path(sys.argv[1]), "--final" in sys.argv[2:]):
        print(line, flush=True)
