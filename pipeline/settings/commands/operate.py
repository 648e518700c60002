"""The settings of commands around a run: plan, restarts, order of samples."""

from typing import Annotated, Any

from pydantic import BeforeValidator, NonNegativeFloat, NonNegativeInt, PositiveInt

from pipeline.base.errors import UserError
from pipeline.settings.quantities import PathText
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Settings, setting


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value  # Such as 14.2e6.


class PlanConfig(RunConfig):
    """A run, and assumptions about the cluster that it is planned for."""

    cluster: str = ""
    """Nodes x GPUs x kind of GPU, as 8x8xH100-80GB; empty plans for one rank without a GPU."""
    samples: Annotated[int, BeforeValidator(_number)] = setting(0, min=0)
    """Training samples per epoch; 0 takes them from the data set."""
    classes: NonNegativeInt = 0
    """Number of classes; 0 takes it from the data set."""
    measured: NonNegativeFloat = setting(0.0, needs="cluster")
    """Images/s that one GPU was measured at, by launch/bench.py gpu or a short run; hours follow from it."""

    def not_written(self) -> tuple[str, ...]:
        """Outputs that this command does not write: those of the run itself."""
        return ("name", "out", "data", "checkpoint")

    def check(self) -> None:
        """Check the run as training would, then the assumptions. Raises UserError."""
        super().check()
        if bool(self.classes) != bool(self.samples) and (self.classes or self.needs_labels):
            raise UserError(f"samples = {self.samples}, classes = {self.classes}: set both, or neither.")


class SamplesConfig(Settings):
    """A query of a run's sample order: the samples of a step."""

    run: PathText
    """Run folder, or the YAML file of a run that has not started"""
    step: PositiveInt
    """The optimizer step, counted from 1 as in log lines"""
    data: PathText = ""
    """Folder of the data set, if it is not where the run's settings say."""
    csv: PathText = setting("", output="file")
    """File for the table; empty prints it."""
    sheet: PathText = setting("", output="file", pattern=r"^$|\.png$")
    """File for the first 64 images, .png, cropped and flipped as for the model."""


class SuperviseConfig(Settings):
    """Automatic restarts of a run."""

    restarts: NonNegativeInt = 10
    """Number of consecutive restarts without a new checkpoint after which the supervisor gives up."""
    pause_seconds: NonNegativeFloat = 10.0
    """Pause before a restart; doubled after each start without a new checkpoint, up to 10 minutes."""
