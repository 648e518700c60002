"""The start of a run: launcher, settings and data are checked before the imports that take seconds (torch, DeepSpeed)."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.estimate.plan import Plan, make_plan
from pipeline.launcher import check_environment, quiet_torch, refuse_busy_port
from pipeline.lifecycle.stop import Stop
from pipeline.settings.run import RunConfig

if TYPE_CHECKING:
    from pipeline.data.dataset.manifest import Dataset
    from pipeline.data.dataset.split import Split
    from pipeline.evaluate.probes.probe import RunProbe


@dataclass(frozen=True)
class Prepared:
    """What a run needs to know before it begins."""

    dataset: "Dataset"
    split: "Split"
    evaluation: "Split"
    run_probe: "RunProbe | None"
    plan: Plan


def run(config: RunConfig) -> None:
    """Train, in a process that a launcher or a person has started. Raises UserError for a user's mistake."""
    check_environment()
    refuse_busy_port()
    quiet_torch()
    with Stop(config) as stop:  # Before everything that may take long.
        prepared = prepare(config)
        from pipeline.train.run import train_prepared  # Late: imports DeepSpeed.

        train_prepared(config, stop, prepared)


def prepare(config: RunConfig) -> Prepared:
    """Open the data and plan the run. Raises UserError for settings, data and weights that cannot be."""
    from pipeline.data.dataset.manifest import open_dataset
    from pipeline.data.dataset.subset import run_splits
    from pipeline.data.storage.cache import Storage  # Late, as all here: Stop hears signals meanwhile.

    world_size = check_environment()
    storage = Storage.create(config.data.retry_minutes, config.data.cache, config.data.cache_gb)
    dataset = open_dataset(config.data.path, storage)
    split, evaluation = run_splits(dataset, config.data, config.seed)
    plan = make_plan(config, len(split), world_size)
    run_probe = None
    if config.probe.every.amount:
        from pipeline.evaluate.probes.probe import open_run_probe  # Imports torch.

        run_probe = open_run_probe(config, dataset)
    if config.init.weights:
        _find_weights(config, config.init.weights)
    return Prepared(dataset, split, evaluation, run_probe, plan)


def _find_weights(config: RunConfig, weights: str) -> None:
    """Raise UserError when a run that has no checkpoint yet names weights that do not exist."""
    from pipeline.checkpoint.store import Checkpoints, checkpoint_folder  # Imports torch.
    from pipeline.model.files import find_file

    if not Checkpoints(checkpoint_folder(config)).candidates():
        find_file(Path(weights))
