"""The settings of what surrounds a run: its plan, its hosts, its restarts, its order, the speed of its step."""

from dataclasses import dataclass
from typing import Literal

from pipeline.errors import UserError
from pipeline.settings.quantities import MAX_SIDE
from pipeline.settings.run import MAX_BATCH, MAX_THREADS, Precision, RunConfig
from pipeline.settings.schema import REQUIRED, setting


@dataclass(frozen=True, kw_only=True)
class PlanConfig(RunConfig):
    """A run, and what is assumed of the cluster that it is planned for."""

    cluster: str = setting("", "Nodes x GPUs x kind, as 8x8xH100-80GB; empty plans one rank on no GPU in particular.")
    samples: int = setting(
        0, "Training samples of an epoch, while the data set is not there; 0 asks the data set.", most=1e15
    )
    classes: int = setting(0, "Classes, while the data set is not there; 0 asks the data set.", most=10_000_000)
    variant: str = setting("", "Architecture of init.weights that are not there yet, as 'ViT-L/16'.")
    mfu: float = setting(0.4, "Assumed share of the GPUs' peak, without recomputing activations (0 to 1).")
    price: float = setting(0.0, "Of one GPU for an hour, in any currency; 0 leaves cost out.")
    save_rate: float = setting(1.0, "Gigabytes a second, all ranks together, that reach the checkpoints' disk.")
    copy_rate: float = setting(10.0, "Gigabytes a second from a GPU to its host's memory.")
    json: str = setting("", "File for all figures as JSON, '-' prints them instead of the table.", output="file")

    def not_written(self) -> tuple[str, ...]:
        """Outputs that are not tried: those of the run, which a plan does not start."""
        return ("name", "out", "data", "checkpoint")

    def check(self) -> None:
        """Refuse what cannot work: the run, as training would, and the assumptions. Raises UserError."""
        super().check()
        for name, value in {"samples": self.samples, "classes": self.classes, "price": self.price}.items():
            if value < 0:
                raise UserError(f"{name} = {value} must not be negative.")
        if (self.samples == 0) != (self.classes == 0):
            raise UserError(f"samples = {self.samples}, classes = {self.classes}: give both, or neither.")
        if not 0 < self.mfu <= 1:
            raise UserError(f"mfu = {self.mfu} must be above 0 and at most 1: 0.4 is 40 % of the GPUs' peak.")
        for name, rate in {"save_rate": self.save_rate, "copy_rate": self.copy_rate}.items():
            if rate <= 0:
                raise UserError(f"{name} = {rate} must be greater than 0.")
        if self.variant and not self.init.weights:
            raise UserError("variant is the architecture of init.weights: set model.name for a new model.")


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """A look at the order of a run: which samples were in a step, or when a sample was seen."""

    run: str = setting(REQUIRED, "Run folder, or the YAML file of one that has not begun")
    step: int = setting(0, "Optimizer step, from 1, as log lines count them: which samples are in it?", most=1e15)
    ranks: int = setting(1, "Number of ranks whose shares of a batch are told apart; 1 is the whole batch.")
    rank: int = setting(0, "With step: the rank whose share is listed, from 0.")
    sample: str = setting("", "Key of a sample of the training split: when is it seen?")
    data: str = setting("", "Folder of the data set, where it is not the one that the run names.")
    csv: str = setting("", "File to write the table into; empty prints it.", output="file")
    sheet: str = setting(
        "", "With step: PNG file for the pictures as they are cropped and flipped for the model.", output="file"
    )

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if (self.step == 0) == (self.sample == ""):
            raise UserError("set step=... to list the samples of a step, or sample=KEY to list the steps of a sample.")
        if self.step < 0:
            raise UserError(f"step = {self.step} must be at least 1: the first step of a run is step 1.")
        if not 0 <= self.rank < self.ranks:
            raise UserError(f"rank = {self.rank} must be at least 0 and below ranks = {self.ranks}.")
        if self.sheet and not self.step:
            raise UserError("sheet=... shows the samples of a step: set step=...")


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """A look at the hosts of a run before it starts."""

    hostfile: str = setting(REQUIRED, "DeepSpeed's hostfile: a line for each host, name slots=8")
    run: str = setting(REQUIRED, "YAML file of the run")
    min_free_gb: float = setting(20.0, "Free space that the output folder must have, in GB.")
    max_clock_offset: float = setting(5.0, "Seconds that a host's clock may differ from this one's.")


@dataclass(frozen=True, kw_only=True)
class SuperviseConfig:
    """Restarts of a run."""

    restarts: int = setting(10, "Restarts in a row that commit nothing new, after which it gives up.")
    pause_seconds: float = setting(
        10.0, "Before a restart; doubled after each that commits nothing, up to 10 minutes.", most=1_000_000
    )
    host_failures: int = setting(2, "Failures of a host of the hostfile after which the run goes on without it.")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        for name, value in {"restarts": self.restarts, "pause_seconds": self.pause_seconds}.items():
            if value < 0:
                raise UserError(f"{name} = {value} must not be negative.")
        if self.host_failures < 1:
            raise UserError(f"host_failures = {self.host_failures} must be greater than 0.")


@dataclass(frozen=True, kw_only=True)
class TrainBenchConfig:
    """A measurement of the training step beside a bare PyTorch loop."""

    model: str = setting("ViT-S/16", "Name of the model.")
    image_size: int = setting(224, "Side of the images in pixels.", most=MAX_SIDE)
    batch: int = setting(64, "Images of a step; 64 is a run's own micro-batch.", most=MAX_BATCH)
    precision: Precision = setting("fp32", "Of weights and activations; the bare loop has no fp32 copy beside bf16.")
    zero_stage: Literal[0, 1, 2, 3] = setting(1, "DeepSpeed ZeRO stage of the pipeline's step.")
    steps: int = setting(1, "Steps of each in a round.")
    rounds: int = setting(5, "Rounds; the median counts.")
    threads: int = setting(0, "Threads on a CPU; 0 is torch's choice.", most=MAX_THREADS)
    peak_tflops: float = setting(0.0, "Peak of the device, for MFU; 0 looks it up, or measures it on unknown devices.")
    data: str = setting(
        "", "Data set to train on in a short real run, instead of noise beside a bare loop: MFU, waiting, checkpoints."
    )
    decoders: int = setting(2, "With data: decoding threads.", most=MAX_THREADS)

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        for name in ("batch", "steps", "rounds", "image_size", "decoders"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} must be at least 1.")
