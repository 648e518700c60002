"""What the pre-training of a study's weights cost, which models without weights may spend, too."""

import contextlib
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.checkpoint.store import step_of
from pipeline.cluster.status_files import read_end, read_settings
from pipeline.experiment.table import unit_of
from pipeline.model.files import find_file
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.monitor.page_folder import PageFolder
from pipeline.process.committed import NAME, run_of_checkpoint
from pipeline.settings.commands.study import StudyConfig

EXA = 1e18


def pretraining_compute(config: StudyConfig, uri: str, notes: list[str]) -> float:
    """FLOPs of the longest pre-training among the weights of a study, if others shall train for as much longer; else 0.

    uri: MLflow's, for weights that it names. notes: gets a sentence for each of the weights, for the report.
    """
    found = {}
    for model in config.models:
        if model.weights:
            runs = compute_of_runs(Path(weights_path(model.weights, uri, out=config.out)))
            found[model.name] = compute = sum(runs)
            before = " by runs that began with weights whose own pre-training is not known" * (not runs[-1])
            notes.append(
                f"{model.name} starts from {model.weights}, "
                + (f"pre-trained for {_in_words(compute)}{before}." if compute else "whose pre-training is not known.")
            )
    if not config.equal_compute or not any(found.values()):
        return 0.0
    longest = max(found, key=found.__getitem__)
    notes.append(f"Models without weights train for {_in_words(found[longest])} more, those of {longest}.")
    return found[longest]


def _in_words(flops: float) -> str:
    size, unit = unit_of(flops / EXA)
    return f"{flops / EXA / size:.4g} {unit}"


def compute_of_runs(weights: Path) -> list[float]:
    """FLOPs of each run that weights come from, the last one first; 0 at the end for weights of which no run is known.

    weights: the folder of a run, or one of its checkpoints.
    """
    found: list[float] = []
    folders = set[Path]()
    while True:
        checkpoint = next((path for path in (weights, weights.parent) if NAME.fullmatch(path.name)), None)
        folder = (run_of_checkpoint(checkpoint) or checkpoint.absolute().parents[1]) if checkpoint else weights
        try:
            end, settings, facts = read_end(folder), read_settings(folder), PageFolder(folder).read_facts().facts
        except (UserError, OSError):  # For example, a file of weights is not a folder.
            end = None
        if end is None or folder in folders:
            return [*found, 0.0]
        folders.add(folder)
        step = step_of(checkpoint) if checkpoint else _newest_step(weights) or end.step
        found.append(settings.train.global_batch * (step * facts.flops_per_image))
        # The weights that the run found at its first start.
        before = facts.origin.path if facts.origin else settings.init.weights
        if before is None:
            return found
        weights = Path(before)


def _newest_step(run: Path) -> int:
    """The step of a run's newest checkpoint, 0 if there is none: status.json of a killed run has the step of its last
    log line.
    """
    with contextlib.suppress(UserError):
        folder = find_file(run).parent
        return step_of(folder) if NAME.fullmatch(folder.name) else 0
    return 0
