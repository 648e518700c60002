"""Fine-tuning by the paper's recipe (ViT paper, B.1.1): a run that starts from weights, with a new zero head.

The recipe itself is the settings: SGD with momentum 0.9, cosine decay, no weight decay, clipping at 1, softmax.
"""

from pipeline.config import RunConfig
from pipeline.errors import UserError
from pipeline.stop import Stop


def run(config: RunConfig) -> None:
    """Fine-tune `config.init.weights` on `config.data`. Raises UserError without weights."""
    if config.init.weights is None:
        raise UserError(
            "init.weights is not set: fine-tuning starts from a run folder, a checkpoint, our .pt or an official .npz. "
            "Set init.weights=runs/NAME; launch/pretrain.py trains a new model."
        )
    stop = Stop(config)  # Before the import, which takes seconds.
    from pipeline import train  # Late: a mistake in the settings needs no DeepSpeed.

    train.run(config, stop)
