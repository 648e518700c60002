"""The settings of the segmentation probe.

Numbers are those of DINOv3's linear segmentation (dinov3/eval/segmentation), except for the steps; docs/segmentation.md
says what else differs.
"""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from pipeline.settings.commands.weights import GivenConfig, WeightsConfig
from pipeline.settings.quantities import Batch, PathText, Seed, Share, Side
from pipeline.settings.schema import setting
from pipeline.settings.shared import GroupsConfig, MlflowConfig


class SegmentConfig(GroupsConfig, GivenConfig, WeightsConfig, MlflowConfig):
    """A linear layer on the frozen patch tokens of weights, trained and scored on images with masks."""

    masks: list[PathText]
    """Their masks, files and folders or one data set: each pixel has the number of its class (PNG, also with a palette)
    or one colour for each class. A mask has its image's path below the folder, except for the suffix.
    """
    split: str = "train"
    """Of a data set, also of masks: the split to learn from."""
    val_source: list[PathText] = setting(list, needs="val_masks")
    """Images to be scored on, files and folders or one data set; empty is val_split of data, else val_share."""
    val_masks: list[PathText] = setting(list, needs="val_source")
    """Their masks."""
    val_split: str = "val"
    """Of data, or if val_source is a data set: the split to be scored on."""
    val_share: Share = 0.1
    """Share of the images that is held out for the score if nothing else says which."""
    image_suffix: str = ""
    """End of the names of images that their masks do not have, as _leftImg8bit."""
    mask_suffix: str = ""
    """End of the names of masks that their images do not have, as _gtFine_labelTrainIds."""
    ignore: list[Annotated[str, Field(pattern="^([0-9]{1,7}|#[0-9a-fA-F]{6})$")]] = ["255"]
    """Values of masks that mean no class: numbers, or colours as '#000000'."""
    short_side: Side = 0
    """Short side to which images are resized for the score, at least image_size, the side of the windows; 0 is
    image_size.
    """
    steps: PositiveInt = 4000
    """Steps of training (40,000 for ADE20K in DINOv3)."""
    train_batch: Batch = 16
    """Crops of a step."""
    lr: PositiveFloat = 1e-3
    """Peak rate of AdamW."""
    seed: Seed = 0
    """Seed of the order, the crops and the layer."""
    batch: Batch = 8
    """Windows per forward pass of the score."""
    apply: list[PathText] = []
    """Images without masks, files and folders or one data set: their predicted masks are written into predicted_masks/
    of the results.
    """
    num_drawn: PositiveInt = setting(16, needs="apply")
    """The first images of apply that sheet.png shows with their masks."""
    apply_split: str = setting("test", needs="apply")
    """If apply is a data set: its split."""
    out: PathText = setting("", output="folder", holds="segmentation")
    """Folder of the results; empty is <run>/segment/<data>-<split>, <run>/segment/<step>-... for one of its
    checkpoints, and runs/segment/<weights>-... for others (refused if it holds those of other weights of this name).
    """
