"""Fine-tuning (ViT paper, B.1.1): a run that starts from weights, with a new zero head.

The recipe is in the settings: SGD with momentum 0.9, cosine decay, no weight decay, clipping at 1, softmax.
"""

from pipeline.base.errors import UserError
from pipeline.settings.run import RunConfig


def run(config: RunConfig, draw: str) -> None:
    """Fine-tune `config.init.weights` on `config.data`. draw: see `train/start.py`. Raises UserError without weights."""
    if config.init.weights is None:
        raise UserError(
            "init.weights is not set: fine-tuning starts from a run folder, a checkpoint, our .pt or an official .npz. "
            "Set init.weights=runs/NAME; launch/pretrain.py trains a new model."
        )
    from pipeline.train import start  # Late, so that a mistake in the settings is reported without pyarrow.

    start.run(config, draw)
