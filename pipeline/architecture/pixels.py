"""What the values of an image mean: `Pixels`. A data set and the models trained on it have one; the default is 8-bit
RGB.

An image is an array (H, W, C) of `type`. A model reads, for each channel,

    (clip((value - low) / (high - low), 0, 1) - mean) / std

so that 8-bit RGB becomes value / 127.5 - 1, as in the ViT paper's code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted

PixelType = Literal[
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "any",
]
# Only for models trained on sets of several types or channels: each set is scaled to [0, 1] by its own range
# (`Pixels.of_all`).
ANY_TYPE: PixelType = "any"
# The values of types that have limits.
FULL_RANGE: dict[str, tuple[float, float]] = {"bool": (0, 1)} | {
    f"{sign}int{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for sign in ("u", "")
    for bits in (8, 16, 32, 64)
}
# Types that are cropped, resized and sent to the device as they are, or in one that OpenCV can resize (bool as 0 and
# 255, so that edges have levels); all others are scaled to [0, 1] as float32 before that.
_BATCH_TYPES: dict[str, Literal["uint8", "uint16", "int16"]] = {
    "bool": "uint8",
    "uint8": "uint8",
    "int8": "int16",
    "uint16": "uint16",
    "int16": "int16",
}
# A number for each channel.
PerChannel = tuple[float, ...]
RGB_CHANNELS = ("red", "green", "blue")
_SHOWN_MEAN = 0.4


@dataclass(frozen=True)
class Pixels:
    """Channels, type and range of images. Raises UserError for fields that do not fit together.

    channels: names, in the order of the array's last axis. type: of the decoded values. low, high: per channel, the
    values that become 0 and 1; values beyond are clipped. mean, std: per channel, of the scaled values in [0, 1]. These
    four are empty until they are measured; weights of other projects may say mean and std alone (`of_unknown`). nodata:
    the value of missing pixels, which are read as `low`, as NaN is; None if there is none. A channel that an image
    lacks is read as `mean`.
    """

    channels: tuple[str, ...] = RGB_CHANNELS
    type: PixelType = "uint8"
    low: PerChannel = (0.0, 0.0, 0.0)
    high: PerChannel = (255.0, 255.0, 255.0)
    mean: PerChannel = (0.5, 0.5, 0.5)
    std: PerChannel = (0.5, 0.5, 0.5)
    nodata: float | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high", "mean", "std"):
            is_given = self.low or (name in ("mean", "std") and self.mean)
            if len(getattr(self, name)) != self.num_channels * bool(is_given):
                raise UserError(
                    f"pixels: {name} has {counted(len(getattr(self, name)), 'value')} for"
                    f" {counted(self.num_channels, 'channel')}."
                )
        if not self.channels or len(set(self.channels)) < self.num_channels:
            raise UserError(f"pixels: channels = {json_record.quoted(self.channels)} must be distinct names.")
        for channel, low, high, std in zip(self.channels, self.low, self.high, self.std, strict=False):
            if not (low < high and std > 0):
                raise UserError(
                    f"pixels: channel {channel!r} needs low < high and std > 0, not {low}, {high} and {std}."
                )

    @property
    def num_channels(self) -> int:
        return len(self.channels)

    @property
    def is_measured(self) -> bool:
        """Whether the range of its values is known, as training needs."""
        return bool(self.low)

    @property
    def is_rgb8(self) -> bool:
        """Whether images are 8-bit RGB: decoded from any 8-bit photograph, gray ones too, with augmentation of
        colours.
        """
        return self.channels == RGB_CHANNELS and self.type == "uint8"

    @property
    def batch_type(self) -> Literal["uint8", "uint16", "int16", "float32"]:
        """The type of the values in a batch. float32: scaled to [0, 1] already."""
        return _BATCH_TYPES.get(self.type, "float32")

    def divisor_and_offset(self) -> tuple[PerChannel, PerChannel]:
        """(d, e) per channel, with which values of a batch, after clipping, become the model's input: value / d - e."""
        found = [
            ((high - low) * std, (low / (high - low) + mean) / std)
            for low, high, mean, std in zip(*self.batch_range(), self.mean, self.std, strict=True)
        ]
        d, e = zip(*found, strict=True)
        return d, e

    def batch_range(self) -> tuple[PerChannel, PerChannel]:
        """(low, high) per channel of the values in a batch."""
        if self.batch_type == "float32":
            return (0.0,) * self.num_channels, (1.0,) * self.num_channels
        times = 255 if self.type == "bool" else 1
        return tuple(times * low for low in self.low), tuple(times * high for high in self.high)

    @property
    def is_clipped(self) -> bool:
        """Whether a value of a batch may be out of its range."""
        return self.batch_type != "float32" and (
            FULL_RANGE[self.type] != (min(self.low), max(self.high)) or len({*self.low}) + len({*self.high}) > 2
        )

    @property
    def shown(self) -> tuple[int, ...]:
        """The places of the three channels that a picture shows: red, green and blue, else the first three; of one or
        two, the first one.
        """
        if set(RGB_CHANNELS) <= set(self.channels):
            return tuple(map(self.channels.index, RGB_CHANNELS))
        return (0, 1, 2) if self.num_channels > 2 else (0, 0, 0)

    @property
    def shown_power(self) -> float:
        """The exponent with which a picture shows shares of the range: if the recorded mean is dark, it is as bright as
        in photographs.
        """
        mean = 1.0 if self.is_rgb8 else sum(self.mean[place] for place in self.shown) / 3
        return math.log(_SHOWN_MEAN) / math.log(min(max(mean, 0.001), _SHOWN_MEAN))

    def describe_shown(self) -> str:
        """The caption of a picture, such as "Shown: channel ct, by the recorded range and mean."; "" for 8-bit RGB."""
        names = tuple(self.channels[place] for place in self.shown)
        said = f"channels {', '.join(names)} as red, green and blue"
        if len({*names}) == 1:
            said = f"channel {names[0]}"
        elif names == RGB_CHANNELS:
            said = "channels red, green and blue"
        return "" if self.is_rgb8 else f"Shown: {said}, by the recorded range and mean."

    def reading(self, data: "Pixels", weights: str, where: str) -> "Pixels":
        """How a model of these pixels reads images of a data set: by its own range, with the data set's nodata.

        A model of `ANY_TYPE` reads them by the data set's range. weights, where: names of both in an error. Raises
        UserError for another type or other channels; for `ANY_TYPE`, only for channels that the model does not have.
        """
        if self.type == ANY_TYPE and {*data.channels} <= {*self.channels}:
            places = [self.channels.index(channel) for channel in data.channels]
            mean, std = (tuple(values[place] for place in places) for values in (self.mean, self.std))
            return replace(data, mean=mean, std=std)
        self.refuse_others(data, weights, where)
        return replace(self, nodata=data.nodata)

    def filled_notes(self, data: "Pixels", where: str) -> list[str]:
        """A line if a model of `ANY_TYPE` reads channels as their mean that `data` does not have. where: name of the
        data.
        """
        lacking = [channel for channel in self.channels if self.type == ANY_TYPE and channel not in data.channels]
        return [f"{where} has no {', '.join(lacking)}: read as the mean"] if lacking else []

    def refuse_others(self, data: "Pixels", weights: str, where: str) -> None:
        """Raise UserError for pixels of other channels or another type. weights, where: names of both in the error."""
        if (self.channels, self.type) != (data.channels, data.type):
            raise UserError(
                f"{weights} reads images of {self.describe()}, and {where} has {data.describe()}: use weights and data"
                " of the same channels and type."
            )

    def fill(self, place: int) -> float:
        """The value of a channel that an image lacks: its mean, which is 0 for a model, as nearly as the type has it
        beside `nodata`.
        """
        low, high = self.low[place], self.high[place]
        value = low + self.mean[place] * (high - low)
        if self.type not in FULL_RANGE:
            return value
        least, most = FULL_RANGE[self.type]
        found = min(max(round(value), least), most)
        return found if found != self.nodata else found + (1 if found < most else -1)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and weights files."""
        return as_lists(vars(self))

    @classmethod
    def of_all(cls, sets: Sequence["Pixels"]) -> "Pixels":
        """Pixels of a model that reads several data sets: those of the first one, or `ANY_TYPE` if they differ in type
        or channels.

        Then its channels are those of the first set and the new ones of each other set, each with the mean and
        deviation of the first set that has it.
        """
        first = sets[0]
        if all((other.channels, other.type) == (first.channels, first.type) for other in sets):
            return first
        found: dict[str, tuple[float, float]] = {}
        for one in sets:
            for channel, mean, std in zip(one.channels, one.mean, one.std, strict=True):
                found.setdefault(channel, (mean, std))
        means, stds = zip(*found.values(), strict=True)
        count = len(found)
        return cls(tuple(found), ANY_TYPE, (0.0,) * count, (1.0,) * count, means, stds)

    @classmethod
    def full_range(cls, channels: tuple[str, ...], kind: PixelType, nodata: float | None = None) -> "Pixels":
        """Pixels whose range is that of their integer type. Raises UserError for floats, which have none."""
        if kind not in FULL_RANGE:
            raise UserError(
                f"values = full: {kind} has no range of its own. Use values=percentiles or values=[low, high]."
            )
        low, high = FULL_RANGE[kind]
        count = len(channels)
        half = (0.5,) * count
        return cls(channels, kind, (float(low),) * count, (float(high),) * count, half, half, nodata)

    @classmethod
    def of_unknown(cls, num_channels: int) -> "Pixels":
        """Pixels of weights that tell only a number of channels: 3: 8-bit RGB; others: any type, no range or names."""
        names = tuple(f"channel {number}" for number in range(1, num_channels + 1))
        return RGB8 if num_channels == 3 else cls(names, low=(), high=(), mean=(), std=())

    def describe(self) -> str:
        """In words, such as "3 channels uint8 (red, green, blue)"."""
        kind = "of any type" if self.type == ANY_TYPE else self.type
        return f"{counted(self.num_channels, 'channel')} {kind} ({', '.join(self.channels)})"

    __str__ = describe


def as_lists(values: dict[str, Any]) -> dict[str, Any]:
    """Fields of a configuration, tuples as lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


RGB8 = Pixels()
