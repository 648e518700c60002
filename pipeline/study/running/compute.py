"""What the pre-training of a study's weights cost, which models without weights may spend, too."""

from pathlib import Path

from pipeline import model as models
from pipeline import objectives
from pipeline.checkpoint.store import step_of
from pipeline.lifecycle.run_folder import read_end
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.process.committed import NAME, run_of_checkpoint
from pipeline.settings import schema
from pipeline.settings.commands.study import StudyConfig
from pipeline.settings.run import RunConfig
from pipeline.study.results import compute_unit

EXA = 1e18


def pretraining_compute(config: StudyConfig, uri: str, notes: list[str]) -> float:
    """FLOPs of the longest pre-training among the weights of a study, if others shall train for as much longer; else 0.

    uri: MLflow's, for weights that it names. notes: gets a sentence for each of the weights, for the report.
    """
    found = {}
    for model in config.models:
        if model.weights:
            found[model.name] = compute = compute_of(Path(weights_path(model.weights, uri)))
            notes.append(
                f"{model.name} starts from {model.weights}, "
                + (f"pre-trained for {_in_words(compute)}." if compute else "whose pre-training is not known.")
            )
    if not config.equal_compute or not any(found.values()):
        return 0.0
    longest = max(found, key=found.__getitem__)
    notes.append(f"Models without weights train for {_in_words(found[longest])} more, those of {longest}.")
    return found[longest]


def _in_words(flops: float) -> str:
    size, unit = compute_unit(flops / EXA)
    return f"{flops / EXA / size:.4g} {unit}"


def compute_of(weights: Path) -> float:
    """FLOPs of the run that weights are of: its folder, or one of its checkpoints; 0 if it is not known."""
    checkpoint = next((path for path in (weights, weights.parent) if NAME.fullmatch(path.name)), None)
    folder = (run_of_checkpoint(checkpoint) or checkpoint.absolute().parents[1]) if checkpoint else weights
    end = read_end(folder)
    if end is None or not (folder / "config.yaml").exists():
        return 0.0
    config = schema.load(RunConfig, folder / "config.yaml", [])
    built = models.read_weights(weights)[0]
    steps = step_of(checkpoint) if checkpoint else end.step
    return float(steps) * config.train.global_batch * objectives.training_flops(config, built)
