"""The settings of commands around a run: plan, hosts, restarts, order of samples, speed of a training step."""

from dataclasses import dataclass
from typing import Literal

from pipeline.base.errors import UserError
from pipeline.settings.commands.bench import RecordConfig
from pipeline.settings.quantities import MAX_THREADS
from pipeline.settings.run import RunConfig
from pipeline.settings.run_sections import Precision
from pipeline.settings.schema import REQUIRED, setting
from pipeline.settings.shared import batch_size, cpu_threads, pixels, share


@dataclass(frozen=True, kw_only=True)
class PlanConfig(RunConfig):
    """A run, and assumptions about the cluster that it is planned for."""

    cluster: str = setting("", "Nodes x GPUs x kind of GPU, as 8x8xH100-80GB; empty plans for one rank without a GPU.")
    network: str = setting(
        "",
        "Network of the nodes: a name (dgx-h100, aws-p5, 25gbe, ...) or Gb/s per node; empty is usual for the GPU.",
        needs="cluster",
    )
    link: float = setting(
        0.0,
        "GB/s and direction between GPUs of a node; 0 is the data sheet's NVLink or PCIe.",
        min=0,
        needs="cluster",
    )
    samples: int = setting(0, "Training samples per epoch; 0 takes them from the data set.", min=0, max=1e15)
    classes: int = setting(0, "Number of classes; 0 takes it from the data set.", min=0, max=10_000_000)
    variant: str = setting("", "Architecture of init.weights that do not exist yet, as 'ViT-L/16'.")
    efficiency: float = setting(
        0.6,
        "Assumed share of the data sheet's FLOP/s and memory bandwidth that kernels reach.",
        above=0,
        max=1,
        needs="cluster",
    )
    measured: float = setting(
        0.0,
        "Images/s that one GPU was measured at; replaces the predicted speed of a GPU.",
        min=0,
        needs="cluster",
    )
    bench: str = setting(
        "",
        "JSON file of launch/bench.py gpu, measured on such a GPU; its fastest exact step of this model replaces the predicted one.",
        path=True,
    )
    mfu: float = share(0.0, "MFU of one GPU, instead of the predicted one; 0 predicts.", needs="cluster")
    price: float = setting(
        0.0, "Price of one GPU hour, in any currency; 0 leaves out the cost.", min=0, needs="cluster"
    )
    save_rate: float = setting(1.0, "Write rate of the checkpoints' disk in GB/s, all ranks together.", above=0)
    copy_rate: float = setting(10.0, "Copy rate from a GPU to host memory in GB/s.", above=0)
    json: str = setting("", "File for all figures as JSON; '-' prints JSON instead of the table.", output="file")

    def not_written(self) -> tuple[str, ...]:
        """Outputs that this command does not write: those of the run itself."""
        return ("name", "out", "data", "checkpoint")

    def check(self) -> None:
        """Check the run as training would, then the assumptions. Raises UserError."""
        super().check()
        if bool(self.classes) != bool(self.samples) and (self.classes or self.needs_labels):
            raise UserError(f"samples = {self.samples}, classes = {self.classes}: set both, or neither.")
        if self.variant and not self.init.weights:
            raise UserError("variant is the architecture of init.weights: set model.name for a new model.")
        given = {"mfu": f"{self.mfu:g}", "measured": f"{self.measured:g}", "bench": self.bench or "0"}
        if len(twice := [f"{name} = {value}" for name, value in given.items() if value != "0"]) > 1:
            raise UserError(f"{' and '.join(twice)} give the speed of a GPU: set one.")
        if self.bench and not self.cluster:
            raise UserError(f"bench = {self.bench} gives the speed of a GPU: give --cluster, too.")


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """A query of a run's sample order: the samples of a step, or the steps of a sample."""

    run: str = setting(REQUIRED, "Run folder, or the YAML file of a run that has not started", path=True)
    step: int = setting(0, "List the samples of this optimizer step, counted from 1 as in log lines.", min=0, max=1e15)
    ranks: int = setting(1, "Number of ranks that the batch is divided over; 1 shows the whole batch.", min=1)
    rank: int = setting(0, "With step: rank whose samples are listed, from 0.", min=0, needs="step")
    sample: str = setting("", "List the steps of this sample of the training split, given by its key.")
    data: str = setting("", "Folder of the data set, if it is not where the run's settings say.", path=True)
    mix: dict[str, str] = setting(
        dict, "Sets of data.mix that are not where the run's settings say, as {datasets/b: /moved/b}."
    )
    csv: str = setting("", "File for the table; empty prints it.", output="file")
    sheet: str = setting("", "With step: PNG file of the images, cropped and flipped as for the model.", output="file")

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        if (self.step == 0) == (self.sample == ""):
            raise UserError("set step=... to list the samples of a step, or sample=KEY to list the steps of a sample.")
        if self.rank >= self.ranks:
            raise UserError(f"rank = {self.rank} must be below ranks = {self.ranks}.")
        if self.sheet and not self.step:
            raise UserError("sheet=... shows the samples of a step: set step=...")


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """A check of a run's hosts before it starts."""

    hostfile: str = setting(REQUIRED, "DeepSpeed's hostfile: one line per host, as 'name slots=8'", path=True)
    run: str = setting(REQUIRED, "YAML file of the run", path=True)
    min_free_gb: float = setting(20.0, "Free space that the output folder needs, in GB.", min=0)
    max_clock_offset: float = setting(5.0, "Largest accepted difference from this host's clock, in seconds.", min=0)


@dataclass(frozen=True, kw_only=True)
class SuperviseConfig:
    """Automatic restarts of a run."""

    restarts: int = setting(
        10, "Number of consecutive restarts without a new checkpoint after which the supervisor gives up.", min=0
    )
    pause_seconds: float = setting(
        10.0,
        "Pause before a restart; doubled after each start without a new checkpoint, up to 10 minutes.",
        min=0,
        max=1_000_000,
    )
    host_failures: int = setting(2, "Number of failures of a host after which the run continues without it.", min=1)


@dataclass(frozen=True, kw_only=True)
class TrainBenchConfig(RecordConfig):
    """A benchmark of the training step against a plain PyTorch loop."""

    model: str = setting("ViT-S/16", "Name of the model.")
    image_size: int = pixels(224, "Side of the images in pixels.", least=1)
    batch: int = batch_size(64, "Images per step; 64 is the default micro-batch of a run.")
    precision: Precision = setting(
        "fp32", "Precision of weights and activations; the plain loop has no fp32 master weights."
    )
    zero_stage: Literal[0, 1, 2, 3] = setting(1, "DeepSpeed ZeRO stage of the pipeline's step.")
    steps: int = setting(1, "Steps of each loop per round.", min=1)
    rounds: int = setting(5, "Number of rounds; the median is reported.", min=1)
    threads: int = setting(0, "Threads on a CPU; 0 is torch's default.", min=0, max=MAX_THREADS)
    peak_tflops: float = setting(0.0, "Peak TFLOP/s of the device, for MFU; 0 looks it up or measures it.", min=0)
    data: str = setting(
        "",
        "Data set for a short real run that measures MFU, waiting times and checkpoints; empty compares with the plain "
        "loop on random images.",
        path=True,
    )
    decoders: int = cpu_threads(2, "With data: decoding threads.", needs="data")
    log_every: int = setting(0, "With data: steps between log lines; 0 is one in each round.", min=0, needs="data")
    compile: bool = setting(False, "With data: torch.compile the model, as engine.compile.", needs="data")
    deterministic: bool = setting(True, "With data: as engine.deterministic.", needs="data")

    def check(self) -> None:
        """Refuse what a run refuses, too. Raises UserError."""
        if self.precision != "fp32" and not self.zero_stage:
            raise UserError(
                f"precision = {self.precision} with zero_stage = 0 takes a wrong first Adam step in DeepSpeed. Use zero_stage=1 or "
                "precision=fp32."
            )
