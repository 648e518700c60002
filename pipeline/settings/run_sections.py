"""The sections of a run's settings: model, data, augmentation, training and so on. `run.py` puts them together."""

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipeline.architecture.config import OPTIONS, Kernel
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.metric import Metric
from pipeline.settings.quantities import (
    MAX_BATCH,
    MAX_SIDE,
    MAX_THREADS,
    MINUTES_PER_YEAR,
    ImageSize,
    Length,
    Limit,
    kernel_setting,
)
from pipeline.settings.schema import REQUIRED, TRACKING_URI, setting

T = TypeVar("T")

Precision = Literal["fp32", "bf16"]
TrainPrecision = Literal["fp32", "bf16", "fp16"]
# What a run learns: value of train.loss -> file and class of pipeline/objectives/.
OBJECTIVES = {
    "softmax": "classification:Classification",
    "sigmoid": "classification:Classification",
    "masked_mean_color": "masked_patches:MaskedPatches",
    "masked_small_patch": "masked_patches:MaskedPatches",
    "masked_pixels": "masked_patches:MaskedPatches",
    "mae": "mae:Mae",
}


def _with_options(cls: type[T]) -> type[T]:
    """The class with what a run may set of a model, as `pipeline/architecture/config.py` declares it."""
    added = []
    for name, option in OPTIONS.items():
        limits = {limit: getattr(option, limit) for limit in ("min", "max", "above", "below")}
        added.append((name, option.kind, setting(option.setting, option.doc, **limits)))
    space = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return make_dataclass(cls.__name__, added, bases=(cls,), namespace=space, frozen=True, kw_only=True)


@_with_options
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: its name, its image size, and the fields of `ViTConfig` and `ResNetConfig` that are marked as options."""

    name: str | None = setting(
        None,
        "Architecture: a size (Ti, S, M, B, L, H, g, G) and a patch side, as ViT-L/16; or Axial-ViT-B/16, R50+ViT-B/16, "
        "BiT-R50x1. Leave it out with init.weights.",
    )
    image_size: ImageSize = setting(
        ImageSize(224, 224), "Input size in pixels: the side of a square, or height x width."
    )

    def for_weights(self) -> dict[str, Any]:
        """The settings that a run may change for init.weights, but for the image size: they act in training only."""
        return {name: getattr(self, name) for name, option in OPTIONS.items() if option.only_trains}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: str = setting(
        REQUIRED,
        "Folder or URL (s3://, gs://) of a data set, made by launch/shard.py",
        path=True,
        on_change="comparison",
    )
    cache: str = setting(
        "",
        "Folder on a local disk that caches shards of a bucket, shared by the ranks of a node; empty is no cache.",
        output="folder",
        on_change="nothing",
    )
    cache_gb: float = setting(
        200.0, "Maximum size of data.cache in GB; least recently read shards are removed.", above=0, on_change="nothing"
    )
    retry_minutes: float = setting(
        10.0,
        "Minutes for which a failed bucket request is retried before the run stops; the watchdog allows such a wait.",
        min=0,
        max=MINUTES_PER_YEAR,
        on_change="nothing",
    )
    train_split: str = setting("train", "Split to train on.", on_change="run")
    eval_split: str = setting("val", "Split to evaluate on.")
    exclude: str = setting("all", "Lists of excluded samples (exclude/*.parquet): all, none, or names with commas.")
    limit: Limit = setting(
        Limit.parse("100%"),
        "Train on a random subset: a number of samples or a share. Larger subsets contain the smaller ones.",
        on_change="run",
    )
    dev_share: float = setting(
        0.0,
        "Share of the training samples held out at random as split 'dev', which is then evaluated instead of "
        "data.eval_split, to choose settings by. 0 is none.",
        min=0,
        below=1,
    )
    streams: int = setting(
        16,
        "Number of equal streams that an epoch is divided into; must divide train.global_batch. More mix better.",
        min=1,
        max=1_000_000,
        on_change="run",
    )
    window: int = setting(
        4096, "Number of consecutive samples of a stream that are shuffled together.", min=1, on_change="run"
    )
    threads: int = setting(2, "Decoding threads of each rank.", min=1, max=MAX_THREADS, on_change="nothing")
    prefetch: int = setting(4, "Number of micro-batches decoded ahead.", min=1, max=10_000, on_change="nothing")
    max_bad_share: float = setting(
        0.001,
        "Share of unreadable images, of those trained on or of those scored, above which the run stops.",
        min=0,
        max=1,
        on_change="comparison",
    )

    @property
    def evaluated_split(self) -> str:
        """Name of the split that the run is evaluated on; the prefix of its metrics."""
        return "dev" if self.dev_share else self.eval_split


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation and preprocessing. The default of a new field must leave images as they are without it."""

    crop: Literal["inception", "resize_crop", "resize_small_crop", "none"] = setting(
        "inception",
        "Training crop: random area and aspect ratio (inception); random crop after resizing the whole image "
        "(resize_crop) or its short side (resize_small_crop) to augment.resize_to; or only a resize (none).",
    )
    area_min: float = setting(0.05, "Inception crop: smallest share of the image's area.", above=0, max=1)
    area_max: float = setting(1.0, "Inception crop: largest share of the image's area.", above=0, max=1)
    aspect_min: float = setting(3 / 4, "Inception crop: smallest width / height.", above=0)
    aspect_max: float = setting(4 / 3, "Inception crop: largest width / height.", above=0)
    resize_to: int = setting(
        0,
        "resize_crop, resize_small_crop: size before the crop; 0 is 7/6 of model.image_size (448 for 384).",
        min=0,
        max=MAX_SIDE,
    )
    flip: bool = setting(True, "Flip horizontally with probability 0.5.")
    resize_filter: Literal["linear", "antialias", "bilinear"] = setting(
        "linear",
        "linear: bilinear without antialias in training, as the papers' code, and area in evaluation; antialias: Pillow's "
        "bilinear; bilinear: bilinear without antialias in both.",
    )
    color_jitter: float = setting(
        0.0,
        "Multiply brightness, contrast and saturation by random factors from 1 - color_jitter to 1 + color_jitter.",
        min=0,
        max=1,
    )
    randaugment_layers: int = setting(
        0, "RandAugment's N: random operations per image (2 in the recipes).", min=0, max=100
    )
    randaugment_magnitude: float = setting(10.0, "RandAugment's M: strength of the operations.", min=0, max=20)
    randaugment_contrast: Literal["mean", "pixel_count"] = setting(
        "mean",
        "Grey value that RandAugment's Contrast blends with: the image's mean, or height x width / 256 (196 at 224 px), as "
        "in the published AugReg and big_vision runs.",
    )
    erase: float = setting(
        0.0, "Random erasing: probability of replacing 2 to 33 % of the image by noise.", min=0, max=1
    )
    mixup: float = setting(
        0.0, "Mixup of image pairs and labels, with a weight from Beta(mixup, mixup) per step.", min=0, max=1
    )
    cutmix: float = setting(
        0.0,
        "CutMix: swap a box between pairs, its area from Beta(cutmix, cutmix); if mixup is set too, each step uses one of "
        "the two.",
        min=0,
        max=1,
    )
    eval_resize: int = setting(
        0, "Evaluation: size before the central crop; 0 is 8/7 of model.image_size (256 for 224).", min=0, max=MAX_SIDE
    )
    eval_crop: Literal["center", "resize", "resize_center"] = setting(
        "center",
        "Evaluation: resize the short side to eval_resize and crop the centre (center); resize the whole image (resize); or "
        "resize the whole image to eval_resize and crop the centre (resize_center, big_vision's few-shot).",
    )

    @property
    def mixes_pairs(self) -> bool:
        return bool(self.mixup or self.cutmix)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    length: Length = setting(REQUIRED, "Length of the run, for example '90 epochs'", above=0, on_change="comparison")
    global_batch: int = setting(
        4096, "Samples per optimizer step, over all ranks.", min=1, max=MAX_BATCH, on_change="run"
    )
    micro_batch: int = setting(
        64,
        "Samples per forward pass of one rank; determines accumulation.",
        min=1,
        max=MAX_BATCH,
        on_change="comparison",
    )
    loss: str = setting(
        "sigmoid",
        "Cross-entropy of class labels, over softmax or summed over sigmoids; or masked patch prediction without labels, of "
        "the mean colour of half of the patches (512 colours), of 4 x 4 such colours, or of the pixels.",
        choices=OBJECTIVES,
        on_change="run",
    )
    label_smoothing: float = setting(0.0, "Softmax only: share of the target spread over all classes.", min=0, max=1)
    log_every: int = setting(50, "Steps between log lines.", min=1, on_change="nothing")
    max_skipped_steps: int = setting(
        20, "Steps skipped for non-finite gradients above which the run stops.", min=0, on_change="comparison"
    )
    stop_after_minutes: float = setting(
        0.0,
        "Wall-clock limit of each start, including the final checkpoint: the run exits in time with code 75. 0 is none.",
        min=0,
        max=MINUTES_PER_YEAR,
        on_change="nothing",
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adam", "sgd"] = setting(
        "adam", "Adam with decoupled weight decay, or SGD with momentum.", on_change="run"
    )
    lr: float = setting(1e-3, "Peak learning rate.", above=0)
    lr_batch: int = setting(
        0,
        "Batch size that lr is meant for: lr is multiplied by train.global_batch / lr_batch. 0 uses lr as it is.",
        min=0,
        max=MAX_BATCH,
    )
    beta1: float = setting(0.9, "Adam: decay of the first moment.", min=0, below=1)
    beta2: float = setting(0.999, "Adam: decay of the second moment.", min=0, below=1)
    eps: float = setting(1e-8, "Adam: term added to the denominator.", above=0)
    momentum: float = setting(0.9, "SGD: momentum.", min=0, below=1)
    weight_decay: float = setting(
        0.1,
        "Weight decay of dense kernels, multiplied by the learning rate; Adam: decoupled, SGD: added to the gradient.",
        min=0,
    )
    weight_decay_end: float | None = setting(
        None,
        "Weight decay at the end of the run, which it approaches along half a cosine. null keeps it constant.",
        min=0,
    )
    layer_decay: float = setting(
        1.0,
        "Factor by which each block learns more slowly than the next one, such as 0.75 for fine-tuning; what comes before the "
        "first block is the slowest.",
        above=0,
        max=1,
    )
    clip: float = setting(1.0, "Clip gradients to this global norm; 0 is no clipping.", min=0)
    ema_decay: float = setting(
        0.0,
        "Decay of an exponential moving average of the weights (Polyak averaging), such as 0.9999; the average is then "
        "evaluated and exported. 0 is none.",
        min=0,
        below=1,
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    decay: Literal["linear", "cosine", "constant", "drops"] = setting(
        "linear", "Learning rate after warm-up; drops divides it by 10 at each of schedule.drops."
    )
    drops: list[float] = setting(
        list, "With decay=drops: points of the run as shares of its length, as [0.3, 0.6, 0.9].", above=0, below=1
    )
    warmup: Length = setting(Length.parse("10000 steps"), "Linear warm-up from 0.")
    final: float = setting(0.0, "Learning rate at the end, as a share of the peak.", min=0, max=1)

    def check(self, prefix: str) -> None:
        """Raise UserError unless drops are set if and only if decay=drops. prefix: of the settings' names."""
        if (self.decay == "drops") != bool(self.drops):
            raise UserError(
                f"{prefix}decay = {self.decay} with {prefix}drops = {quoted(self.drops)}: decay=drops needs shares of the run, "
                f"as {prefix}drops=[0.3,0.6,0.9], and other decays take none."
            )


@dataclass(frozen=True, kw_only=True)
class RunScheduleConfig(ScheduleConfig):
    cooldown: Length = setting(
        Length.parse("0 steps"),
        "With decay=constant: last part of the run, in which the rate falls linearly to schedule.final; 0 is none. Until it begins, "
        "runs of any length are the same, so launch/study.py trains them once.",
    )

    def check(self, prefix: str) -> None:
        """Check as above, and refuse a cooldown of a rate that falls anyway. Raises UserError."""
        super().check(prefix)
        if self.cooldown.amount and self.decay != "constant":
            raise UserError(f"{prefix}cooldown = {self.cooldown} needs {prefix}decay=constant, and it is {self.decay}.")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    zero_stage: Literal[0, 1, 2, 3] = setting(
        1, "DeepSpeed ZeRO stage: 1 shards the optimizer's state over ranks, 2 also gradients, 3 also parameters."
    )
    precision: TrainPrecision = setting(
        "bf16",
        "Precision of weights and activations; master weights and moments are fp32. fp16, for older GPUs, scales the loss.",
        on_change="result",
    )
    offload: bool = setting(False, "Keep the optimizer's state and update in host memory: less GPU memory, but slower.")
    compile: bool = setting(False, "torch.compile the model: minutes at the start, but faster on a GPU.")
    fused: bool | None = setting(
        None,
        "Update all weights in one kernel, which rounds some of them otherwise than several do. null: on a GPU, unless offload is set.",
    )
    activation_checkpointing: bool = setting(False, "Recompute blocks in the backward pass: less memory, 1/3 slower.")
    deterministic: bool = setting(
        True,
        "On a GPU, use kernels that give the same bits each time: a resumed run then equals an uninterrupted one bit for bit. "
        "A CPU always does.",
    )
    peak_tflops: float = setting(
        0.0, "Peak TFLOP/s of a device, for MFU; 0 looks it up or measures it.", min=0, on_change="nothing"
    )
    timeout_minutes: float = setting(
        10.0,
        "Timeout of a collective call, after which the run fails.",
        above=0,
        max=MINUTES_PER_YEAR,
        on_change="nothing",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    every: Length = setting(Length.parse("5%"), "Interval between evaluations; the last step always has one.", above=0)
    batch: int = setting(64, "Images per forward pass of one rank.", min=1, max=MAX_BATCH)


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Scores of features without training: few-shot linear accuracy and k-nearest-neighbour accuracy."""

    train_split: str = setting("train", "Split that few-shot images and neighbours are chosen from.")
    shots: list[int] = setting([5], "Few-shot linear accuracy: images per class, as [1,5,10,25]; 0 is none.", min=0)
    shots_seeds: int = setting(3, "Random choices of few-shot images; the score is their mean.", min=1, max=1_000)
    l2: list[float] = setting(
        [1024.0],
        "Strengths of the few-shot ridge regression (2^10 in big_vision); each is reported.",
        above=0,
        min_items=1,
    )
    neighbours: int = setting(0, "kNN accuracy: number of neighbours that vote (20 in DINO); 0 is none.", min=0)
    temperature: float = setting(0.07, "kNN: the weight of a vote is exp(cosine similarity / temperature).", above=0)
    neighbour_images: int = setting(50_000, "kNN: number of random training images to search; 0 is all.", min=0)

    @property
    def probes(self) -> bool:
        return any(self.shots) or self.neighbours > 0

    def metrics(self, prefix: str) -> dict[str, Metric]:
        """What these probes measure: prefix_5shot, prefix_5shot_std, prefix_20nn; with several strengths prefix_5shot_l2_1024."""
        several = len(self.l2) > 1
        shots = sorted({*self.shots} - {0})
        names = [f"{prefix}_{n}shot" + (f"_l2_{l2:g}" if several else "") for n in shots for l2 in self.l2]
        spread = [f"{name}_std" for name in names] if self.shots_seeds > 1 else []
        names += [f"{prefix}_{self.neighbours}nn"] if self.neighbours else []
        return dict.fromkeys(names, Metric("share", "higher", "probe")) | dict.fromkeys(spread, Metric(group="probe"))

    def check_splits(self, prefix: str, split: str) -> None:
        """Raise UserError if probes would be tested on their training split. prefix: of the settings' names."""
        if self.probes and self.train_split == split:
            raise UserError(
                f"{prefix}train_split = {prefix}split = {split}: features would be tested on what they are fitted to. "
                f"Use another {prefix}train_split, or {prefix}shots=0 {prefix}neighbours=0."
            )


@dataclass(frozen=True, kw_only=True)
class RunProbeConfig(ProbeConfig):
    every: Length = setting(Length.parse("0 steps"), "Interval between probes, with one at the end; 0 is none.")
    data: str = setting("", "Folder or URL of the data set for probes; empty is the run's own.", path=True)
    split: str = setting("val", "Split that probes are tested on.")

    @property
    def prefix(self) -> str:
        """The beginning of the names of its metrics: the data set's name, or the split of the run's own data."""
        if not self.data:
            return self.split
        return self.data.rstrip("/").rpartition("/")[2] if "://" in self.data else Path(self.data).resolve().name


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Length = setting(Length.parse("2%"), "Interval between checkpoints; the last step always has one.", above=0)
    keep: int = setting(2, "Number of newest checkpoints that are kept.", min=1)
    keep_every: Length = setting(Length.parse("0 steps"), "Interval between permanently kept checkpoints; 0 is none.")
    best: str = setting(
        "",
        "Metric of an evaluation or a probe (val_top1, val_loss, val_20nn) whose best checkpoint is kept permanently; empty is none.",
    )
    folder: str = setting(
        "",
        "Folder or URL (s3://, gs://) for checkpoints, in <folder>/<name>; empty is <out>/<name>/checkpoints.",
        output="folder",
    )
    wait_minutes: float = setting(
        30.0,
        "Minutes for which the watchdog lets training wait for a checkpoint to be committed, at the next one or at the end, or to be "
        "read when the run goes back to it; data.retry_minutes more if it is in a bucket.",
        min=0,
        max=MINUTES_PER_YEAR,
        on_change="nothing",
    )


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    on_spike: Literal["warn", "skip", "rollback"] = setting(
        "warn",
        "When the loss is far above recent losses: log it (warn); skip the step, for which ranks agree on each step's loss "
        "before its backward pass (skip); or return to the last checkpoint and skip the data up to the spike (rollback).",
        renamed={"say": "warn"},
    )
    spike_sigma: float = setting(6.0, "A spike is this many standard deviations above the recent mean.", above=0)
    spike_window: int = setting(128, "Number of recent losses that a loss is compared with.", min=8, max=1_000_000)
    max_rollbacks: int = setting(
        3, "With on_spike=rollback: number of rollbacks after which the run stops.", min=0, on_change="comparison"
    )
    hang_minutes: float = setting(
        5.0,
        "Minutes without progress after which the run reports the rank, host and line of code that it waits for, and "
        "ends; 0 is never. Waits that may last do not count: of any rank for a bucket (data.retry_minutes) and for a checkpoint "
        "(checkpoint.wait_minutes). Must be below engine.timeout_minutes.",
        min=0,
        max=MINUTES_PER_YEAR,
        on_change="nothing",
    )
    straggler_ratio: float = setting(
        1.5,
        "Report a rank whose data loading and forward passes take this many times as long as the median rank's; 0 is never.",
        min=0,
        on_change="nothing",
    )


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    trace_step: int = setting(
        0, "First step of a torch.profiler trace of rank 0, kept in the run's folder and MLflow; 0 is none.", min=0
    )
    trace_steps: int = setting(3, "Number of steps in the trace.", min=1, max=100_000)
    communication: bool = setting(False, "Time collective calls as well; they then no longer overlap with computation.")


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    weights: str | None = setting(
        None,
        "Start from these weights: a run, a checkpoint, our .pt, or those of other projects (docs/weights.md).",
        path=True,
    )
    new_head: bool = setting(True, "With init.weights: replace the head by a zero-initialised linear layer.")
    kernel: Kernel | None = kernel_setting()


@dataclass(frozen=True, kw_only=True)
class TrackConfig:
    enabled: bool = setting(True, "Send parameters and metrics to MLflow (metrics.jsonl is always written).")
    uri: str = setting("", "MLflow tracking URI; empty is sqlite:///<out>/mlflow.db.", form=TRACKING_URI)
    experiment: str = setting("vit", "MLflow experiment.")
    figures: bool = setting(
        True,
        "Draw curves, confusions, predictions and attention at evaluations, in a process of low priority (docs/reviewing.md).",
    )
    parent_run: str = setting(
        "", "ID of the MLflow run below which this one is shown, as launch/finetune_grid.py sets it; empty is none."
    )
    register: str = setting(
        "",
        "Name of a registered model: each kept, best and last checkpoint becomes a version, with the aliases best and last; "
        "empty is none.",
    )
    upload_weights: bool = setting(
        False,
        "Upload the weights of these checkpoints to MLflow as well (fp32: 1.2 GB for ViT-L); else their path is recorded.",
    )


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    env: str = setting(
        "NCCL_* GLOO_* AWS_* GOOGLE_* MLFLOW_* OMP_NUM_THREADS DS_ACCELERATOR TORCH_EXTENSIONS_DIR",
        "Environment variables that are passed to every host (launch/hosts.py): names, where * stands for any text, or "
        "NAME=value. Put secrets into the environment, because settings are displayed.",
        command=True,
    )
