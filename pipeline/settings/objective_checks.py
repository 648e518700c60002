"""The objectives by name, and what they need of a run's other settings, as far as it is known without torch; their classes check the rest."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pipeline.architecture.config import Config, ViTConfig
from pipeline.architecture.variants import configure
from pipeline.base.errors import UserError
from pipeline.base.json_record import finite
from pipeline.base.words import counted
from pipeline.settings.quantities import MAX_SIDE, ImageSize

if TYPE_CHECKING:
    from pipeline.settings.run import RunConfig

# What a run learns: value of train.loss -> file and class of pipeline/objectives/.
OBJECTIVES = {
    "softmax": "classification:Classification",
    "sigmoid": "classification:Classification",
    "dino": "dino:Dino",
    "lejepa": "lejepa:Lejepa",
    "mae": "mae:Mae",
    "masked_mean_color": "masked_patches:MaskedPatches",
    "masked_small_patch": "masked_patches:MaskedPatches",
    "masked_pixels": "masked_patches:MaskedPatches",
    "distill": "distill:Distill",
    "distill_classes": "distill_classes:DistillClasses",
    "pseudo_labels": "pseudo_labels:PseudoLabels",
}
# Those whose loss is of all samples of a step at once: a step is one micro-batch of each rank. Here, for plans, without torch.
OF_WHOLE_BATCH = frozenset({"lejepa"})
# What objectives do with labels; those that are not listed read none. "partly": they learn those that there are, and some sets may have none.
# "scored": only held-out images need some. Here, because data sets are opened before torch is imported.
Labels = Literal["learned", "partly", "scored", "unread"]
LABELS: dict[str, Labels] = {
    "softmax": "learned",
    "sigmoid": "learned",
    "distill_classes": "scored",
    "pseudo_labels": "partly",
}
# For messages: those that read no labels.
NEED_NO_LABELS = " | ".join(loss for loss in OBJECTIVES if loss not in LABELS)
# Defaults of objective.local_size and objective.mask_share. Here, because they are compared with the patches of a model before torch is
# imported.
LOCAL_SIZE, MASK_SHARE = 96, 0.75


def check_objective(config: "RunConfig") -> None:
    """Raise UserError for settings of a run that do not fit its train.loss."""
    loss = config.train.loss
    if loss in ("dino", "lejepa") and config.augment.crop not in ("inception", "random_resized"):
        raise UserError(
            f"train.loss = {loss} needs random crops: augment.crop = {config.augment.crop} must be random_resized or inception."
        )
    compares = dino_compares_micro_batch(config.objective) if loss == "dino" else ""
    if compares and min(config.train.micro_batch, config.train.global_batch) == 1:
        raise UserError(
            f"{compares} compares the images of a micro-batch, and train.micro_batch = 1 has one. Use train.micro_batch=2 or more."
        )
    if loss in OF_WHOLE_BATCH and config.train.global_batch == 1:
        raise UserError(
            f"train.loss = {loss} compares all samples of a step: train.global_batch = 1 must be 2 or more."
        )
    if loss in ("mae", "dino", "lejepa") and config.model.name:
        given = config.model.options | {"num_classes": 0, "representation": False}
        backbone = configure(config.model.name, config.model.image_size, **given)
        if loss == "mae":
            check_encodes_kept(backbone, "mae")
            assert isinstance(backbone, ViTConfig), "check_encodes_kept refuses it"
            if 0 < (share := _number(config, "mask_share", MASK_SHARE)) < 1:
                num_kept(backbone.num_patches, share)
        elif _number(config, "local_views", 1) and 1 <= (size := _number(config, "local_size", LOCAL_SIZE)) <= MAX_SIDE:
            check_small_views(backbone, int(size))


def refuse_without_labels(config: "RunConfig", num_classes: int) -> None:
    """Raise UserError if a run reads labels and its data set, of num_classes classes, has none, or one from which nothing is learned."""
    if config.needs_labels and not num_classes:
        raise UserError(
            f"train.loss = {config.train.loss} needs labels, and this data set has none (0 classes). Use an objective that needs "
            f"none (train.loss={NEED_NO_LABELS}), or a data set with labels."
        )
    if config.train.loss in ("softmax", "pseudo_labels") and num_classes == 1:
        raise UserError(
            f"train.loss = {config.train.loss} needs at least two classes, and this data set has one: its loss is 0 and its accuracy 100 % from the "
            f"first step, and nothing is learned. Use an objective that needs no labels (train.loss={NEED_NO_LABELS}), or "
            "train.loss=sigmoid if some images do not have the label."
        )


def _number(config: "RunConfig", name: str, default: float = 0) -> float:
    """A number of the section `objective`; 0 for what is none, which the objective's class refuses."""
    return finite(config.objective.get(name, default)) or 0


def check_encodes_kept(vit: Config, loss: str) -> None:
    """Raise UserError if this backbone cannot encode a part of its patches (`encode_kept` of vit.py), or has parameters that then get no gradient.

    loss: value of train.loss.
    """
    found = ["no tokens"]
    if isinstance(vit, ViTConfig):
        if not vit.has_stem:
            vit.check_covered()
        fits = {
            "stem": vit.stem is None,
            "small_stem": vit.small_stem is None,
            "axial": not vit.axial,
            "positions": vit.positions != "relative",
            "positions_at": vit.positions_at == "stem",
            "patch_stride": vit.stride == vit.patch_size,
            "representation": not vit.representation,
            "pool": not vit.pools_by_attention,
            "pool_norm": not vit.pool_norm,
        }
        found = [f"{name} = {vit.to_dict()[name]}" for name, does in fits.items() if not does]
    if found:
        raise UserError(
            f"train.loss = {loss} trains a plain ViT, such as ViT-B/16, with a class token or mean pooling, whose patches do not overlap, with "
            f"positions at the stem and without representation layer; this backbone has {', '.join(found)}."
        )


def num_kept(num_patches: int, mask_share: float) -> int:
    """Number of patches that MAE keeps. Raises UserError if it is none."""
    kept = int(num_patches * (1 - mask_share))
    if kept < 1:
        raise UserError(
            f"objective.mask_share = {mask_share} keeps none of {counted(num_patches, 'patch')}. Use smaller patches or a smaller share."
        )
    return kept


def check_small_views(
    model: Config,
    size: ImageSize | int,
    name: str = "objective.local_size",
    instead: str = ", or objective.local_views=0",
) -> None:
    """Raise UserError if a backbone cannot read images of this size; a number is the side of a square. name: of the setting."""
    if not isinstance(model, ViTConfig):
        return
    size = ImageSize.parse(size)
    patch, step = model.patch_pixels, model.stride * model.reduction
    for side in size:
        if side < patch or (side - patch) % step:
            covered = patch + max(0, side - patch) // step * step
            raise UserError(
                f"{name} = {side}: patches of {patch} pixels leave pixels unseen. Use {covered} or {covered + step}{instead}."
            )
    if model.grid_at(*size) != model.grid:
        model.check_any_grid()


def dino_compares_micro_batch(objective: Mapping[str, Any]) -> str:
    """`Objective.compares_micro_batch` of DINO. objective: the section of that name."""
    if objective.get("centring") == "sinkhorn":
        return "objective.centring = sinkhorn"
    weight = objective.get("koleo_weight", 0)
    return f"objective.koleo_weight = {weight}" if finite(weight) else ""
