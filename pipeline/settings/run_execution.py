"""The sections of a run's settings that say how it is computed, scored, saved, watched and tracked. `run.py` has them
all.
"""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pipeline.architecture.config import ChannelRule
from pipeline.base.errors import UserError
from pipeline.base.metric import SPREAD, Metric
from pipeline.settings.quantities import Batch, Length, PathText
from pipeline.settings.schema import Settings, setting
from pipeline.settings.shared import ShellWords, minutes

TrainPrecision = Literal["fp32", "bf16", "fp16"]


class EngineConfig(Settings):
    zero_stage: int = setting(
        1,
        "DeepSpeed ZeRO stage: 1 shards the optimizer's state over ranks, 2 also gradients, 3 also parameters.",
        min=0,
        max=3,
    )
    precision: TrainPrecision = setting(
        "bf16",
        "Precision of weights and activations; master weights and moments are fp32. fp16, for older GPUs, scales the"
        " loss.",
        on_change="result",
    )
    offload: bool = setting(False, "Keep the optimizer's state and update in host memory: less GPU memory, but slower.")
    compile: bool = setting(
        False,
        "torch.compile the model: about 40 s at the start, then 6 % faster for ViT-L/16 in bf16 on an H100, 31 % for a"
        " small hybrid. Losses change by rounding only. Stage 3 gains nothing: its hooks cut the graph at each layer.",
    )
    fused: bool | None = setting(
        None,
        "Update all weights in one kernel, which rounds some of them otherwise than several do. null: on a GPU, unless"
        " offload is set.",
    )
    activation_checkpointing: bool = setting(False, "Recompute blocks in the backward pass: less memory, 1/3 slower.")
    deterministic: bool = setting(
        True,
        "On a GPU, use kernels that give the same bits each time: a resumed run then equals an uninterrupted one bit"
        " for bit. A CPU always does.",
    )
    peak_tflops: NonNegativeFloat = setting(
        0.0, "Peak TFLOP/s of a device, for MFU; 0 looks it up or measures it.", on_change="nothing"
    )
    timeout_minutes: float = minutes(
        10.0, "Timeout of a collective call, after which the run fails.", min=None, above=0
    )


class EvaluateConfig(Settings):
    every: Length = setting(Length.parse("5%"), "Interval between evaluations; the last step always has one.", above=0)
    batch: Batch = setting(64, "Images per forward pass of one rank.")


class ProbeConfig(Settings):
    """Scores of features without training: few-shot linear and k-nearest-neighbour accuracy; without labels, RankMe."""

    train_split: str = setting(
        "train", "Split that few-shot images and neighbours are chosen from.", needs="shots|neighbours"
    )
    shots: list[NonNegativeInt] = setting([5], "Few-shot linear accuracy: images per class, as [1,5,10,25]; 0: off.")
    shots_seeds: int = setting(
        3, "Random choices of few-shot images; the score is their mean.", min=1, max=1_000, needs="shots"
    )
    l2: list[PositiveFloat] = setting(
        [1024.0],
        "Strengths of the few-shot ridge regression (2^10 in big_vision); each is reported.",
        min_items=1,
        needs="shots",
    )
    neighbours: NonNegativeInt = setting(0, "kNN accuracy: number of neighbours that vote (20 in DINO); 0: off.")
    temperature: PositiveFloat = setting(
        0.07, "kNN: the weight of a vote is exp(cosine similarity / temperature).", needs="neighbours"
    )
    neighbour_images: NonNegativeInt = setting(
        50_000, "kNN: number of random training images to search; 0 is all.", needs="neighbours"
    )

    rankme_images: NonNegativeInt = setting(
        0,
        "RankMe and standard deviation of features, for which no labels are needed: number of random images, of the"
        " run's training split or of the split scored (2048, say; 25,600 in the paper); 0: off.",
    )

    @property
    def reads_labels(self) -> bool:
        return any(self.shots) or self.neighbours > 0

    @property
    def probes(self) -> bool:
        return self.reads_labels or self.rankme_images > 0

    def metrics(self, prefix: str) -> dict[str, Metric]:
        """What these probes measure: prefix_5shot, prefix_5shot_std, prefix_20nn; with several strengths
        prefix_5shot_l2_1024; SPREAD.
        """
        several = len(self.l2) > 1
        shots = sorted({*self.shots} - {0})
        names = [f"{prefix}_{n}shot" + (f"_l2_{l2:g}" if several else "") for n in shots for l2 in self.l2]
        spread = [f"{name}_std" for name in names] if self.shots_seeds > 1 else []
        names += [f"{prefix}_{self.neighbours}nn"] if self.neighbours else []
        found = dict.fromkeys(names, Metric("share", "higher", "probe")) | dict.fromkeys(spread, Metric(group="probe"))
        return found | (SPREAD if self.rankme_images else {})

    def check_splits(self, prefix: str, split: str) -> None:
        """Raise UserError if probes would be tested on their training split. prefix: of the settings' names."""
        if self.reads_labels and self.train_split == split:
            raise UserError(
                f"{prefix}train_split = {prefix}split = {split}: features would be tested on what they are fitted to. "
                f"Use another {prefix}train_split, or {prefix}shots=0 {prefix}neighbours=0."
            )


class RunProbeConfig(ProbeConfig):
    every: Length = setting(Length.parse("0 steps"), "Interval between probes, with one at the end; 0: off.")
    data: PathText = setting(
        "", "Folder or URL of the data set for probes; empty is the run's own.", needs="shots|neighbours"
    )
    split: str = setting("val", "Split that probes are tested on.")

    @property
    def prefix(self) -> str:
        """The beginning of the names of its metrics: the data set's name, or the split of the run's own data."""
        if "://" in self.data:
            return self.data.partition("?")[0].rstrip("/").rpartition("/")[2]
        return Path(self.data).resolve().name if self.data else self.split

    def measured(self) -> dict[str, Metric]:
        return self.metrics(self.prefix)


class CheckpointConfig(Settings):
    every: Length = setting(Length.parse("2%"), "Interval between checkpoints; the last step always has one.", above=0)
    keep: PositiveInt = setting(2, "Number of newest checkpoints that are kept.")
    keep_every: Length = setting(Length.parse("0 steps"), "Interval between permanently kept checkpoints; 0: none.")
    best: str = setting(
        "",
        "Metric of an evaluation or a probe (val_top1, val_loss, val_20nn) whose best checkpoint is kept permanently;"
        " empty: none.",
    )
    folder: PathText = setting(
        "",
        "Folder or URL (s3://, gs://) for checkpoints, in <folder>/<name>; empty is <out>/<name>/checkpoints.",
        output="folder or URL",
    )
    wait_minutes: float = minutes(
        30.0,
        "Minutes for which the watchdog lets training wait for a checkpoint to be committed, at the next one or at the"
        " end, or to be read when the run goes back to it; data.retry_minutes more if it is in a bucket.",
    )


class HealthConfig(Settings):
    on_spike: Literal["warn", "skip", "rollback"] = setting(
        "warn",
        "When the loss is far above recent losses: log it (warn); skip the step, for which ranks agree on each step's"
        " loss before its backward pass (skip); or return to the last checkpoint before it and skip the data since then"
        " (rollback).",
    )
    spike_sigma: PositiveFloat = setting(6.0, "A spike is this many standard deviations above the recent mean.")
    spike_window: int = setting(128, "Number of recent losses that a loss is compared with.", min=8, max=1_000_000)
    max_rollbacks: NonNegativeInt = setting(
        3,
        "With on_spike=rollback: number of rollbacks above which the run stops.",
        on_change="comparison",
        needs="on_spike=rollback",
    )
    hang_minutes: float = minutes(
        5.0,
        "Minutes without progress after which the run reports the rank, host and line of code that it waits for, and"
        " ends; 0 is never. Waits that may last do not count: of any rank for a bucket (data.retry_minutes) and for a"
        " checkpoint (checkpoint.wait_minutes). Must be below engine.timeout_minutes.",
    )
    straggler_ratio: NonNegativeFloat = setting(
        1.5,
        "Report a rank whose data loading and forward passes take this many times as long as the median rank's; 0 is"
        " never.",
        on_change="nothing",
    )


class InitConfig(Settings):
    weights: PathText | None = setting(
        None,
        "Start from these weights: a run, a checkpoint, or those of other projects (docs/weights.md).",
    )
    new_head: bool = setting(
        True, "With init.weights: replace the head by a zero-initialised linear layer.", needs="weights"
    )
    mean_pool: bool = setting(
        False,
        "With a new head: it reads the mean of the patches after a LayerNorm of its own, as MAE fine-tunes"
        " (model.pool_norm).",
        needs="weights",
    )
    attentive_pool: bool = setting(
        False,
        "With a new head: it reads a new attention pool of all tokens. With train.freeze=encoder, an attentive probe.",
        needs="weights",
    )
    channels: ChannelRule = setting(
        "auto",
        "How the first layer of 8-bit RGB weights reads other channels: those named red, green or blue keep theirs,"
        " others get the mean, times 3/C, and one channel the sum (auto); red, green, blue in turn, times 3/C (repeat);"
        " named ones keep theirs and others begin at 0 (zero) or new (random).",
        needs="weights",
    )


class TrackConfig(Settings):
    enabled: bool = setting(True, "Send parameters and metrics to MLflow (metrics.jsonl is always written).")
    uri: str = setting("", "MLflow tracking URI; empty is sqlite:///<out>/mlflow.db.")
    experiment: str = setting("vit", "MLflow experiment.")
    figures: bool = setting(
        True,
        "Draw curves, confusions, predictions and reconstructions at evaluations, in a process of low priority, and"
        " attention at the end (docs/reviewing.md).",
    )
    tensorboard: bool = setting(
        False, "Also write event files into tensorboard/ of the run folder, for `tensorboard --logdir <out>`."
    )
    parent_run: str = setting(
        "", "ID of the MLflow run below which this one is shown, as launch/finetune_grid.py sets it; empty: none."
    )
    register: str = setting(
        "",
        "Name of a registered model: each kept, best and last checkpoint becomes a version, with the aliases best and"
        " last; empty: none.",
    )
    upload_weights: bool = setting(
        False,
        "Upload the weights of these checkpoints to MLflow as well (fp32: 1.2 GB for ViT-L); else their path is"
        " recorded.",
    )


class LaunchConfig(Settings):
    env: ShellWords = setting(
        "NCCL_* GLOO_* AWS_* GOOGLE_* MLFLOW_* OMP_NUM_THREADS DS_ACCELERATOR TORCH_EXTENSIONS_DIR",
        "Environment variables that are passed to every host (launch/hosts.py): names, where * stands for any text, or "
        "NAME=value. Put secrets into the environment, because settings are displayed.",
    )
