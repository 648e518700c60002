"""Frozen parameters of a backbone (`train.freeze`), and the depth of each parameter.

A frozen parameter gets no gradient and no optimizer state; checkpoints hold its value as they hold buffers.
"""

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.model import Model, ViTConfig

NOTHING, BACKBONE, ENCODER = "none", "backbone", "encoder"


def freeze(backbone: Model, what: str) -> None:
    """Freeze all but the head (`what` = "backbone"), all but the attention pool and the head ("encoder"), or what comes
    before the first block and the first n ("n blocks", or "all but n blocks", the last).

    "none" freezes nothing. Raises UserError for a number of blocks, or an attention pool, that the model does not have.
    """
    if what == NOTHING:
        return
    depth, top = depths(backbone)
    blocks = num_frozen_blocks(what, top - 1)
    if blocks is not None and not (isinstance(backbone.config, ViTConfig) and 0 <= blocks < top - 1):
        has = counted(top - 1, "block") if isinstance(backbone.config, ViTConfig) else "none: it is a ResNet"
        raise UserError(
            f"train.freeze = {what} must leave at least one block to train, and the model has {has}. Use another"
            " number, or train.freeze=backbone to train the head alone."
        )
    if what == ENCODER and not (isinstance(backbone.config, ViTConfig) and backbone.config.pools_by_attention):
        raise UserError(
            "train.freeze = encoder trains the attention pool and the head, and the model has no attention pool. Use "
            "train.freeze=backbone to train the head alone, or init.attentive_pool=true for a new pool."
        )
    trained = ("pool.", "head.") if what == ENCODER else ("head.",)
    for name, parameter in backbone.named_parameters():
        is_frozen = not name.startswith(trained) if blocks is None else depth[name] <= blocks
        parameter.requires_grad_(not is_frozen)


def num_frozen_blocks(what: str, num_blocks: int) -> int | None:
    """How many of a model's first blocks a value of `train.freeze` freezes; None if it names none."""
    if what in (NOTHING, BACKBONE, ENCODER):
        return None
    number = int(what.split()[-2])
    return num_blocks - number if what.startswith("all but") else number


def depths(backbone: Model, prefix: str = "") -> tuple[dict[str, int], int]:
    """Returns (depth of the parameters by name, largest depth), as BEiT and MAE count them for layer decay.

    0 is what comes before the first block, n block number n, and the largest what comes after the last block.
    prefix: put before each name.
    """
    blocks = "blocks" if hasattr(backbone, "blocks") else "units"
    top = len(getattr(backbone, blocks)) + 1
    children = [name for name, _ in backbone.named_children()]  # In the order of computation.
    after = children[children.index(blocks) + 1 :]
    found = {}
    for name, _ in backbone.named_parameters():
        first, *rest = name.split(".")
        found[f"{prefix}{name}"] = int(rest[0]) + 1 if first == blocks else top if first in after else 0
    return found, top
