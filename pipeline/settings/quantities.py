"""Types of settings that are written with a unit ('90 epochs', '10%') or as 224x384, and upper limits of numbers."""

import math
import os
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from annotated_types import Interval
from pydantic import AfterValidator, Field
from pydantic_core import CoreSchema, core_schema

from pipeline.base.errors import UserError

# Upper limits of settings, far above sensible values: a larger number is a mistake and would overflow somewhere.
MAX_SIDE = 16_384
MAX_SEED = 2**63 - 1
MINUTES_PER_YEAR = 366 * 24 * 60
Seed = Annotated[int, Interval(ge=0, le=MAX_SEED)]
Side = Annotated[int, Interval(ge=0, le=MAX_SIDE)]  # of an image, in pixels
Batch = Annotated[int, Interval(ge=1, le=2**24)]
Threads = Annotated[int, Interval(ge=1, le=4096)]
Tasks = Annotated[int, Interval(ge=0, le=1_000_000)]
Share = Annotated[float, Interval(ge=0, le=1)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
ShareBelow1 = Annotated[float, Interval(ge=0, lt=1)]
# A path, in which ~ is the home folder, or an address.
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
# A number without a sign, as 90, .5 or 1.2e+9.
_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)"


def whole_number(text: str, most: int = 10**18) -> int | None:
    """The number written in these ASCII digits; None for other text and above `most`.

    str.isdigit() also accepts "²", and int() raises for it and for thousands of digits.
    """
    number = int(text) if re.fullmatch("[0-9]{1,19}", text) else None
    return None if number is None or number > most else number


def _read_by_pydantic(cls: Any, source: Any, handler: Any) -> CoreSchema:
    """Values are text for pydantic, and written as text."""
    return core_schema.no_info_plain_validator_function(
        cls.parse,
        json_schema_input_schema=core_schema.union_schema([core_schema.str_schema(), core_schema.float_schema()]),
        serialization=core_schema.to_string_ser_schema(),
    )


@dataclass(frozen=True)
class Length:
    """A length of training: '90 epochs', '10000 steps', '1.2e9 samples', or '5%' of the whole run."""

    amount: float
    unit: Literal["epochs", "steps", "samples", "%", "s"]
    # A regular expression for the units of this class, the one of a number without a unit, and how it is written.
    units: ClassVar[str] = "epochs?|steps?|samples?|%"
    usual_unit: ClassVar[str] = ""
    form: ClassVar[str] = "write a length as '90 epochs', '10000 steps', '1.2e9 samples' or '5%'"
    __get_pydantic_core_schema__ = classmethod(_read_by_pydantic)

    def __gt__(self, number: float) -> bool:
        return self.amount > number

    @classmethod
    def parse(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        match = re.fullmatch(rf"\s*{_NUMBER}\s*({cls.units})\s*", str(value))
        if not match:
            raise ValueError(cls.form)
        unit: Any = match[2] or cls.usual_unit
        return cls(float(match[1]), unit if unit in ("%", "s") else unit.rstrip("s") + "s")

    def __str__(self) -> str:
        # Exact, so that a checkpoint's text is read back as the same length.
        amount = f"{self.amount:.0f}" if self.amount.is_integer() else repr(self.amount)
        return f"{amount}{'' if self.unit == '%' else ' '}{self.unit}"

    def steps(self, num_samples: int, global_batch: int, total_steps: int | None = None) -> int:
        """Number of optimizer steps, rounded to the nearest (90 epochs of 14.2e6 samples at batch 4096 = 312,012
        steps).

        num_samples: samples in one epoch. total_steps: length of the run, needed by '%'.
        """
        exact = Fraction(self.amount)
        if self.unit == "%":
            if total_steps is None:
                raise UserError(f"train.length = {self} is a share of itself: write it in epochs, steps or samples.")
            exact = exact * total_steps / 100
        elif self.unit != "steps":
            exact = exact * (num_samples if self.unit == "epochs" else 1) / global_batch
        return math.floor(exact + Fraction(1, 2))

    def share_of(self, whole: "Length", global_batch: int) -> Fraction | None:
        """This length over the whole, the length of a run; None if that depends on the number of samples in an
        epoch.
        """
        if self.unit == "%":
            return Fraction(self.amount) / 100
        in_samples = [
            Fraction(length.amount) * (global_batch if length.unit == "steps" else 1) for length in (self, whole)
        ]
        if (self.unit == "epochs") != (whole.unit == "epochs"):
            return None
        return in_samples[0] / in_samples[1]


PositiveLength = Annotated[Length, Field(gt=0)]


class ImageSize(NamedTuple):
    """Height and width of an image in pixels, written as '224' for a square or '224x384' for height x width."""

    height: int
    width: int

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return _read_by_pydantic(cls, source, handler)

    @classmethod
    def parse(cls, value: object) -> "ImageSize":
        if isinstance(value, tuple):
            return cls(*value)
        match = re.fullmatch(r"\s*([0-9]+)(?:\s*x\s*([0-9]+))?\s*", str(value))
        if not match:
            raise ValueError("write the side of a square, as 224, or height x width, as 224x384")
        size = cls(int(match[1]), int(match[2] or match[1]))
        if not 1 <= min(size) <= max(size) <= MAX_SIDE:
            raise ValueError(f"a side has from 1 to {MAX_SIDE:,} pixels")
        return size

    def __str__(self) -> str:
        return str(self.height) if self.height == self.width else f"{self.height}x{self.width}"


@dataclass(frozen=True)
class Limit(Length):
    """How many samples of a split are used: a number, or a share such as '10%'."""

    units = "%|samples|"
    usual_unit = "samples"
    form = "write a number of samples, as 9e6, or a share of them, as 10%"

    def __str__(self) -> str:
        return super().__str__().removesuffix(" samples")

    def count(self, num_samples: int) -> int:
        """Number of samples out of `num_samples`, rounded to the nearest."""
        return self.steps(num_samples, 1, num_samples)


@dataclass(frozen=True)
class LogInterval(Length):
    """How often a line is logged: a number of steps, or a time such as '10 s'."""

    units = "s|steps?|"
    usual_unit = "steps"
    form = "write a time, as '10 s', or a number of steps, as '50 steps'"


def one_of(names: Collection[str]) -> AfterValidator:
    """A text that must be one of these names, of which there may be more later."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return name

    return AfterValidator(check)


def _split(words: str) -> str:
    shlex.split(words)
    return words


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    return pattern


RegularExpression = Annotated[str, AfterValidator(_compiles)]
# Words as in a shell, with quotes.
ShellWords = Annotated[str, AfterValidator(_split)]
