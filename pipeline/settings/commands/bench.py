"""The settings of the benchmark of one GPU."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from pipeline.settings.quantities import PathText, PositiveShare, Threads
from pipeline.settings.schema import Settings, setting


class GpuBenchConfig(Settings):
    """A benchmark of training on one GPU: how fast it is, and which settings make it so."""

    json: PathText = setting("", output="file")
    """File for the results as JSON, replaced after each result; empty: none."""
    models: list[Annotated[str, Field(pattern=r"^.+@[1-9]\d{0,3}$")]] = []
    """Models as NAME@PIXELS; all configurations are measured for the first, the best ones for the others. Empty is
    L/16, H/14 at 224 px, L/16 at 384, B/16 at 224; on a CPU ViT-mu/16@32.
    """
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu runs the same code in seconds on a tiny model, as a test of it."""
    seconds: PositiveFloat = 470.0
    """Time for all measurements; what is left out for lack of time is listed."""
    candidate_seconds: PositiveFloat = 2.0
    """Time in which each configuration's steps are timed."""
    only: list[Literal["product", "step", "profile", "attention", "bits", "shards", "objectives", "fit"]] = []
    """Parts to measure, by the first word of their names; empty measures all."""
    batch: NonNegativeInt = 0
    """Images per step; 0 is the power of two with at most 32,768 tokens."""
    tolerance: PositiveShare = 0.005
    """Largest relative difference to the loss of the plain step, in each of the first steps, of an exact configuration.
    """
    decoders: Threads = 14
    """Decoding threads of the run from shards."""
