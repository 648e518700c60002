"""Lists the samples of a step. Computed from the order alone, for past and future steps."""

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.errors import UserError
from pipeline.base.files import table_csv
from pipeline.base.words import aligned, counted
from pipeline.checkpoint.store import Checkpoints, State, checksum, read_state
from pipeline.cluster.status_files import SETTINGS_FILE, read_settings
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import NOTHING_EXCLUDED, Split
from pipeline.data.loading.order import Order, batch_of_step, batches_before
from pipeline.data.mixture.order import train_order
from pipeline.data.mixture.run_data import open_run_data
from pipeline.data.mixture.split import MIXTURE, MixedSplit, mixed_until, mixture_facts
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import to_path
from pipeline.process.committed import checkpoints_of, read_checksums
from pipeline.settings import schema
from pipeline.settings.commands.operate import SamplesConfig
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Fact, differences, fact_of, facts_of

_STATE = "state.json"
_MAX_DRAWN = 64


def run(config: SamplesConfig) -> list[dict[str, Any]]:
    """Print or write the requested table; returns its rows. Raises UserError for a user's mistake."""
    path = Path(config.run)
    state = _newest_state(path)
    trained, skipped_batches = (state.step, state.left_out) if state else (0, [])
    of_run = _settings(path, state)
    batch = of_run.train.global_batch
    if config.data:
        of_run = replace(of_run, data=replace(of_run.data, path=config.data))
    data = open_run_data(of_run.data, of_run.seed, of_run.labels)
    split = data.split
    if state:
        _refuse_other_data(state, data.dataset, split)
    order = train_order(split, of_run.data, of_run.seed, batch)
    steps = of_run.train.length.steps(data.epoch_samples, batch)
    if config.step > steps:
        raise UserError(
            f"step = {config.step}, but {config.run} has {counted(steps, 'step')} (from 1, as log lines count them)."
        )

    number = batch_of_step(config.step - 1, skipped_batches)
    rows, uses = order.slice(number)
    table = _of_step(data.dataset, split, order, number * batch, rows, uses)
    if config.sheet:
        _draw(of_run, split, rows[:_MAX_DRAWN], uses[:_MAX_DRAWN], Path(config.sheet))
    when = "trained" if config.step <= trained else "not trained yet"
    when += f" (the newest checkpoint is of step {trained:,})" if state else ""
    said = f"step {config.step:,} of {steps:,}: {counted(len(rows), 'sample')}, {when}"
    if config.csv:
        with replacing(Path(config.csv)) as out:
            out.write(table_csv(table))
    else:
        print(*aligned([list(table[0]), *(list(map(str, use.values())) for use in table)]), sep="\n")
    for line in [*split.notes(), said]:
        print(line, file=sys.stderr)
    return table


def _newest_state(path: Path) -> State | None:
    """Read state.json of a checkpoint, or of a run's newest checkpoint in which it is intact; None if there is none."""
    if (path / _STATE).exists():
        return read_state(path)
    folder = to_path(str(checkpoints_of(path)))
    committed = Checkpoints(folder).candidates()
    for checkpoint in committed:
        known = (read_checksums(checkpoint) or {}).get(_STATE)
        with suppress(FileNotFoundError):
            if known and checksum(checkpoint / _STATE) == known:
                return read_state(checkpoint)
        print(f"{checkpoint} is damaged ({_STATE} does not match its checksum): not used.", file=sys.stderr)
    if committed:
        raise UserError(f"no checkpoint in {folder} is intact, so the steps that were trained are not known.")
    return None


def _settings(path: Path, state: State | None) -> RunConfig:
    """Return a run's settings: from its newest checkpoint, else the run folder, else a YAML file."""
    if state:
        known = facts_of(RunConfig)  # The identity has other entries, too.
        given = {name: value for name, value in state.identity.items() if fact_of(name, known)}
        return schema.load(RunConfig, None, [f"{name}={json.dumps(value)}" for name, value in given.items()])
    if path.is_dir():
        try:
            return read_settings(path)
        except FileNotFoundError:
            raise UserError(f"{path} is not a run folder: it has neither checkpoints nor {SETTINGS_FILE}.") from None
    return schema.load(RunConfig, path)


def _refuse_other_data(state: State, dataset: Dataset, split: Split) -> None:
    then: dict[str, Any] = dict(state.identity)
    now: dict[str, Any] = {"fingerprint": dataset.fingerprint, "excluded": split.excluded}
    known = {"fingerprint": Fact(), "excluded": Fact(NOTHING_EXCLUDED)}
    if isinstance(split, MixedSplit):
        now[MIXTURE] = mixture_facts(split)
        seen = batches_before(state.step, state.left_out)
        then[MIXTURE], now[MIXTURE] = mixed_until(then, seen), mixed_until(now, seen)
        known[MIXTURE] = Fact()
    for change in differences(then, now, known):
        raise UserError(
            f"{dataset.path} is not what the run was trained on: {change}. Give the right folder with data=..., or"
            " put back what was there."
        )


def _of_step(
    dataset: Dataset, split: Split, order: Order, first: int, rows: np.ndarray, uses: np.ndarray
) -> list[dict[str, Any]]:
    """Return one row per sample, in batch order. first: position of the first one. uses: how often each was used
    before.
    """
    positions = np.arange(first, first + len(rows))
    labels = [split.labels_of(row).tolist() for row in rows]
    columns: dict[str, Any] = {
        "place": (positions % order.global_batch).tolist(),
        "key": split.keys(rows),
        "row": split.manifest_rows(rows).tolist(),
        "shard": [to_path(split.shard_paths[shard]).name for shard in split.shard_of(rows)],
    }
    if isinstance(split, MixedSplit):
        columns["set"] = [split.set_names[number] for number in split.set_of(rows)]
    columns["label"] = [" ".join(map(str, of)) for of in labels]
    columns["class"] = ["; ".join(dataset.classes[label] for label in of) for of in labels]
    columns["epoch"] = order.epochs(positions).tolist()
    if order.is_balanced:
        columns["used before"] = uses.tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _draw(config: RunConfig, split: Split, rows: np.ndarray, epochs: np.ndarray, file: Path) -> None:
    """Write a picture of augmented images in table order, the views of each below it; unreadable images are black."""
    from pipeline.base.gallery import Tile, folded, gallery  # Late: tables need neither Matplotlib nor torch.
    from pipeline.base.page import png
    from pipeline.data.loading.loader import Loader
    from pipeline.data.loading.values import to_rgb
    from pipeline.data.loading.views import read_by, train_views
    from pipeline.objectives import kind

    writer = train_views(kind(config.train.loss).views(config), config.seed, *read_by(split.pixels, split))
    with Loader(split, writer, config.data.threads) as loader:
        batch = next(loader.batches([(rows, epochs)]))
    views = [to_rgb(view, split.pixels) for group in batch.views for view in group.numpy()]
    figure = gallery(folded([[Tile(pixels) for pixels in view] for view in views]), "Images as the model sees them")
    with replacing(file) as out:
        out.write(png(figure, caption=split.pixels.describe_shown()))
