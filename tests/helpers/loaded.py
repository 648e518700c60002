"""What a step reads of a batch that a test made, as the loader and the training loop do it."""

import torch

from pipeline.data.loading.loader import Batch
from pipeline.objectives.objective import Inputs, Objective


def inputs_of(objective: Objective, batch: Batch) -> Inputs:
    """On the CPU, with what the objective draws in its mode: training or not."""
    batch.drawn.update(objective.draw(batch, objective.training))
    return objective.inputs(batch, torch.device("cpu"), None)
