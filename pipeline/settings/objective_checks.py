"""What objectives need of a run's other settings, as far as it is known without torch; their classes check the rest."""

from typing import TYPE_CHECKING, Any

from pipeline.base.errors import UserError
from pipeline.settings.run_sections import OBJECTIVES, READS_LABELS

if TYPE_CHECKING:
    from pipeline.settings.run import RunConfig


def check_objective(config: "RunConfig") -> None:
    """Raise UserError for settings of a run that do not fit its train.loss."""
    loss = config.train.loss
    if loss == "mae" and config.model.name:
        _check_mae(config.model)
    elif loss in ("dino", "lejepa"):
        if config.augment.crop not in ("inception", "random_resized"):
            raise UserError(
                f"train.loss = {loss} needs random crops: augment.crop = {config.augment.crop} must be random_resized or inception."
            )
        (_check_dino if loss == "dino" else _check_lejepa)(config)


def refuse_without_labels(config: "RunConfig", num_classes: int) -> None:
    """Raise UserError if a run learns labels and its data set, of num_classes classes, has none."""
    if config.reads_labels and not num_classes:
        others = [loss for loss in OBJECTIVES if loss not in READS_LABELS]
        raise UserError(
            f"train.loss = {config.train.loss} learns labels, and this data set has none (0 classes). Use an objective that needs "
            f"none (train.loss={' | '.join(others)}), or a data set with labels."
        )


def _check_mae(model: Any) -> None:
    """model: `ModelConfig`, most of whose fields are declared in architecture/config.py."""
    if "+" in model.name or model.name.startswith(("BiT-", "Axial-")) or model.small_stem is not None:
        stem = f" with model.small_stem = {model.small_stem}" if model.small_stem is not None else ""
        raise UserError(
            f"train.loss = mae removes patches of a plain ViT, not of {model.name}{stem}. Use a model such as ViT-B/16."
        )
    if model.positions == "relative" or model.positions_at != "stem":
        raise UserError(
            "train.loss = mae encodes kept patches only, with positions added once before the first block, not model.positions = "
            f"{model.positions}, model.positions_at = {model.positions_at}. Use positions=sincos2d_mae, positions_at=stem."
        )
    if model.pool == "map" or model.pool_norm or model.patch_stride is not None:
        raise UserError(
            "train.loss = mae trains neither attention pooling nor a norm after pooling, and its patches do not overlap: set model.pool=token or gap, and leave out "
            "model.pool_norm and model.patch_stride."
        )


def _check_dino(config: "RunConfig") -> None:
    compares = {
        "objective.koleo_weight": bool(config.objective.get("koleo_weight")),
        "objective.centring = sinkhorn": config.objective.get("centring") == "sinkhorn",
    }
    if min(config.train.micro_batch, config.train.global_batch) == 1 and any(compares.values()):
        name = next(name for name, is_used in compares.items() if is_used)
        raise UserError(
            f"{name} compares the images of a micro-batch, and train.micro_batch = 1 has one. Use train.micro_batch=2 or more."
        )


def _check_lejepa(config: "RunConfig") -> None:
    if config.train.global_batch == 1:
        raise UserError(
            "train.loss = lejepa tests the distribution of a batch: train.global_batch = 1 must be 2 or more."
        )
