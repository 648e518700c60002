"""ResNets: the configuration of a BiT, and what hybrids have of them in their stems."""

from dataclasses import dataclass
from itertools import pairwise

from pipeline.architecture.fields import Fields
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted

_MAX_STAGES, _MAX_UNITS = 8, 1024


@dataclass(frozen=True)
class ResNetConfig(Fields):
    """The architecture of a BiT ResNet (arXiv 1912.11370). Raises UserError for values that do not fit together."""

    units: tuple[int, ...]  # units of each stage; each stage but the first halves height and width
    width: int  # channels after the root; stage i has 4 * 2^i times as many
    image_size: tuple[int, int]  # height, width, in pixels
    num_classes: int  # 0: no head, the model returns its features
    head_bias: float = 0.0  # initial bias of the head
    pixels: Pixels = RGB8  # what the values of its images mean; from the data set of its training

    def __post_init__(self) -> None:
        super().__post_init__()
        check_units("units", self.units, 1)
        if self.width % 32:
            raise UserError(f"model: width = {self.width} must be a multiple of 32, the groups of GroupNorm.")

    @property
    def num_features(self) -> int:
        """Channels of the features that the head reads."""
        return 4 * self.width * 2 ** (len(self.units) - 1)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the head for one image: class logits."""
        return self.num_classes


def stem_reduction(stem: tuple[int, ...] | None) -> int:
    """The factor by which a hybrid's stem downsamples; 1 without a stem. stem: units of each stage."""
    return 1 if stem is None else 4 * 2 ** max(len(stem) - 1, 0)


def small_stem_reduction(channels: tuple[int, ...]) -> int:
    """The factor by which a stem for small images downsamples: 2 for each unit that has more channels than the one
    before.
    """
    return 2 ** sum(before < after for before, after in pairwise(channels))


def check_units(name: str, units: tuple[int, ...], min_stages: int) -> None:
    """Raise UserError for wrong units of the stages of a ResNet."""
    if not min_stages <= len(units) <= _MAX_STAGES or not all(1 <= unit <= _MAX_UNITS for unit in units):
        raise UserError(
            f"model: {name} = {quoted(units)} must have {min_stages} to {_MAX_STAGES} stages, each of 1 to {_MAX_UNITS}"
            " units."
        )


def check_small_stem(channels: tuple[int, ...], stem: tuple[int, ...] | None) -> None:
    """Raise UserError for wrong channels of a small stem, or for a model with a ResNet stem, whose units `stem` has,
    too.
    """
    if stem is not None:
        raise UserError(
            "model: small_stem and the ResNet of the model's name are two stems. Use a name such as ViT-Ti/1."
        )
    grows = all(a <= b for a, b in pairwise(channels))
    if not 1 <= len(channels) <= _MAX_UNITS or not grows or any(c % 16 or not 16 <= c <= 2**12 for c in channels):
        raise UserError(
            f"model: small_stem = {quoted(list(channels))} must be 1 to {_MAX_UNITS} multiples of 16 up to 4,096, none "
            "below the one before, such as [32,64,128]."
        )
