"""Fine-tuning by the paper's recipe (ViT paper, B.1.1): a run that starts from weights, with a new zero head.

The recipe itself is the settings: SGD with momentum 0.9, cosine decay, no weight decay, clipping at 1, softmax.
"""

from pipeline.errors import UserError
from pipeline.settings.run import RunConfig


def run(config: RunConfig) -> None:
    """Fine-tune `config.init.weights` on `config.data`. Raises UserError without weights."""
    if config.init.weights is None:
        raise UserError(
            "init.weights is not set: fine-tuning starts from a run folder, a checkpoint, our .pt or an official .npz. "
            "Set init.weights=runs/NAME; launch/pretrain.py trains a new model."
        )
    from pipeline.train import start  # Late: a mistake in the settings needs no pyarrow.

    start.run(config)
