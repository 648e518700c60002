"""What a run that learns labels should know of samples of its training split that have none."""

from pipeline.base.words import counted
from pipeline.data.mixture.run_data import RunData

# Values of train.loss of which `label_notes` counts the samples with or without a label.
_COUNTED = ("softmax", "pseudo_labels")


def data_notes(data: RunData, loss: str) -> list[str]:
    """Lines to print about the data of a run with this `train.loss`: how they were opened, then `label_notes`."""
    return data.notes(labels=loss not in _COUNTED) + label_notes(data, loss)


def label_notes(data: RunData, loss: str) -> list[str]:
    """Lines about how many samples have a label; often none. Counts the labels of each sample only where there may be none."""
    if loss not in _COUNTED:
        return []
    bare, samples = data.split.num_unlabelled, counted(len(data.split), "sample")
    if loss == "softmax":
        return [f"train.loss = softmax learns nothing from {bare:,} of {samples}: no label"] if bare else []
    if bare:
        return [f"{len(data.split) - bare:,} of {samples} have a label"]
    return ["all samples have a label: nothing gets a pseudo-label. Add images without one (data.mix)"]
