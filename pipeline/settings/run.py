"""The settings of a run: every field, typed and explained.

`--help` of each command prints this file's fields; `configs/` holds the shipped trees. Checks that need the data set or
the number of ranks are in `pipeline/estimate/plan.py`. The settings of other commands are in the files beside this one.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

from pipeline.errors import UserError
from pipeline.json_record import quoted
from pipeline.settings.quantities import MAX_SIDE, ImageSize, Length, Limit
from pipeline.settings.schema import REQUIRED, setting

Precision = Literal["fp32", "bf16"]
TrainPrecision = Literal["fp32", "bf16", "fp16"]
# Upper ends of ranges, far beyond what is sensible: what is above is a slip, and would overflow or take for ever.
MAX_SEED = 2**63 - 1
MAX_WIDTH = 2**16
MAX_BATCH = 2**24
MAX_THREADS = 4096
MINUTES_OF_A_YEAR = 366 * 24 * 60
TrainLoss = Literal["softmax", "sigmoid", "masked_mean_color", "masked_small_patch", "masked_pixels"]


def _length(text: str, doc: str) -> Length:
    return setting(Length.parse(text), doc)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str | None = setting(
        None,
        "ViT-L/16: a size (Ti, S, M, B, L, H, g, G) and a patch side; Axial-ViT-B/16; R50+ViT-B/16; BiT-R50x1. Weights "
        "bring their own.",
    )
    image_size: ImageSize = setting(
        ImageSize(224, 224), "Pixels of the images the model sees: the side of a square, or height x width, as 224x384."
    )
    width: int | None = setting(
        None, "Overrides the variant's width D; of a ResNet, the channels of its root.", most=MAX_WIDTH
    )
    depth: int | None = setting(None, "Overrides the variant's number of blocks.", most=10_000)
    mlp_width: int | None = setting(None, "Overrides the variant's MLP width.", most=8 * MAX_WIDTH)
    num_heads: int | None = setting(None, "Overrides the variant's number of heads.", most=10_000)
    patch_stride: int | None = setting(
        None, "Pixels from patch to patch; less than the patch side, and they overlap.", most=MAX_SIDE
    )
    positions: Literal["learned", "learned2d", "sincos2d", "relative", "none"] = setting(
        "learned", "Position embedding: learned 1-D or 2-D, fixed sine-cosine, relative attention, or none."
    )
    positions_at: Literal["stem", "blocks", "shared"] = setting(
        "stem", "Positions are added once, or before every block: to each a table of its own, or shared the same one."
    )
    pool: Literal["token", "gap", "map"] | None = setting(
        None, "The head reads a class token, the mean of all tokens, or attention pooling; null is token (axial: gap)."
    )
    representation: bool = setting(True, "Dense + tanh layer before the head (pre-training; fine-tuning drops it).")
    gelu: Literal["tanh", "erf"] = setting("tanh", "GELU: tanh approximation (official code) or exact.")
    dropout: float = setting(0.0, "Dropout after positions, attention output and MLP layers (0.1 on ImageNet-21k).")
    drop_path: float = setting(0.0, "Stochastic depth: probability of skipping the last block; the first one's is 0.")
    head_bias: float = setting(0.0, "First value of the head's bias; -10 suits the sigmoid loss on 21k classes.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: str = setting(REQUIRED, "Folder or URL (s3://, gs://) of a data set, made by launch/shard.py")
    cache: str = setting(
        "",
        "Folder on a local disk that keeps shards of a bucket, shared by a node's ranks; empty is none.",
        output="folder",
    )
    cache_gb: float = setting(200.0, "Gigabytes that data.cache may take; the least recently read shards go first.")
    retry_minutes: float = setting(
        10.0, "How long a failing request to a bucket is tried again before the run stops.", most=MINUTES_OF_A_YEAR
    )
    train_split: str = setting("train", "Split to train on.")
    eval_split: str = setting("val", "Split to evaluate on.")
    exclude: str = setting("all", "Lists of samples to leave out (exclude/*.parquet): all, none, or names with commas.")
    limit: Limit = setting(
        Limit.parse("100%"),
        "Random subset of the training split: a number of samples or a share; smaller lie in larger.",
    )
    dev_share: float = setting(
        0.0,
        "Share of the training samples that are held out at random and evaluated on, as 'dev', in place of eval_split: to "
        "choose settings by. 0 is none.",
    )
    streams: int = setting(
        16, "Equal streams an epoch is cut into; divides train.global_batch. More mix better.", most=1_000_000
    )
    window: int = setting(4096, "Samples of a stream that are shuffled together.")
    threads: int = setting(2, "Decoding threads of each rank.", most=MAX_THREADS)
    prefetch: int = setting(4, "Micro-batches that are decoded ahead.", most=10_000)
    max_bad_share: float = setting(0.001, "Share of undecodable images above which the run stops.")

    @property
    def evaluated_split(self) -> str:
        """What evaluations of a run, and their metrics, are called by."""
        return "dev" if self.dev_share else self.eval_split


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    crop: Literal["inception", "resize_crop", "resize_small_crop", "none"] = setting(
        "inception",
        "Training crop: random area and aspect; all of it, or its short side, resized to resize_to then a random "
        "crop; or a plain resize.",
    )
    area_min: float = setting(0.05, "Inception crop: smallest share of the image's area.")
    area_max: float = setting(1.0, "Inception crop: largest share of the image's area.")
    aspect_min: float = setting(3 / 4, "Inception crop: smallest width / height.")
    aspect_max: float = setting(4 / 3, "Inception crop: largest width / height.")
    resize_to: int = setting(
        0,
        "resize_crop, resize_small_crop: short side before the crop; 0 is 7/6 of model.image_size (448 for 384).",
        most=MAX_SIDE,
    )
    flip: bool = setting(True, "Random horizontal flip, p = 0.5.")
    resize_filter: Literal["linear", "antialias", "bilinear"] = setting(
        "linear",
        "Bilinear without antialias, as the papers' code (evaluation shrinks by area); Pillow's bilinear, everywhere; or "
        "bilinear without antialias, everywhere.",
    )
    color_jitter: float = setting(
        0.0, "Brightness, contrast and saturation, each times a random 1 - color_jitter to 1 + color_jitter."
    )
    randaugment_layers: int = setting(
        0, "RandAugment's n: random operations one after another (2 in the recipes).", most=100
    )
    randaugment_magnitude: float = setting(10.0, "RandAugment's m: strength of the operations, 0 to 20.")
    randaugment_contrast: Literal["mean", "pixel_count"] = setting(
        "mean",
        "Grey that RandAugment's Contrast blends with: the image's mean, or height x width / 256 (196 at 224 px), as in the "
        "published AugReg and big_vision runs.",
    )
    erase: float = setting(0.0, "Probability that a random 2 to 33 % of the image become noise.")
    mixup: float = setting(0.0, "Images and labels are mixed in pairs, by a share from Beta(mixup, mixup) each step.")
    cutmix: float = setting(
        0.0, "Pairs swap a box, its area from Beta(cutmix, cutmix); with mixup too, each step takes one of the two."
    )
    eval_resize: int = setting(
        0,
        "Evaluation: short side, or square, before the central crop; 0 is 8/7 of image_size (256 for 224).",
        most=MAX_SIDE,
    )
    eval_crop: Literal["center", "resize", "resize_center"] = setting(
        "center",
        "Evaluation: short side to eval_resize and central crop; the whole image resized; or that to eval_resize, and its "
        "central crop (big_vision's few-shot).",
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    length: Length = setting(REQUIRED, "Length of the run, for example '90 epochs'")
    global_batch: int = setting(4096, "Samples per optimizer step, over all ranks.", most=MAX_BATCH)
    micro_batch: int = setting(64, "Samples per forward pass of one rank; accumulation is worked out.", most=MAX_BATCH)
    loss: TrainLoss = setting(
        "sigmoid",
        "Of classes: cross-entropy over softmax, or summed over sigmoids. Or masked patch prediction, without labels: of "
        "half of the patches the mean colour (512 of them), 4 x 4 such colours, or the pixels.",
    )
    label_smoothing: float = setting(0.0, "Softmax only: share of the target spread over all classes.")
    log_every: int = setting(50, "Steps between log lines.")
    max_skipped_steps: int = setting(20, "Steps skipped for a non-finite gradient before the run stops.")
    stop_after_minutes: float = setting(
        0.0,
        "Wall-clock limit of each start, commit included: it leaves in time with exit code 75; 0 is none.",
        most=MINUTES_OF_A_YEAR,
    )

    @property
    def masked(self) -> str | None:
        """What is predicted of corrupted patches: mean_color, small_patch or pixels. None where classes are predicted."""
        return self.loss.removeprefix("masked_") if self.loss.startswith("masked_") else None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adam", "sgd"] = setting("adam", "Adam with decoupled weight decay, or SGD with momentum.")
    lr: float = setting(1e-3, "Peak learning rate.")
    lr_batch: int = setting(
        0, "Batch that lr is for: it is scaled by train.global_batch / lr_batch; 0 takes it as it is.", most=MAX_BATCH
    )
    beta1: float = setting(0.9, "Adam: decay of the first moment.")
    beta2: float = setting(0.999, "Adam: decay of the second moment.")
    eps: float = setting(1e-8, "Adam: added to the denominator.")
    momentum: float = setting(0.9, "SGD: momentum.")
    weight_decay: float = setting(
        0.1, "Of dense kernels, times the learning rate; Adam: decoupled, SGD: added to the gradient."
    )
    clip: float = setting(1.0, "Largest global gradient norm; 0 is no clipping.")
    ema_decay: float = setting(
        0.0, "Of the running mean of the weights that is then evaluated and exported, as 0.9999 (Polyak); 0 is none."
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    decay: Literal["linear", "cosine", "constant", "drops"] = setting(
        "linear", "Shape of the learning rate after warm-up; drops divides it by 10 at each of schedule.drops."
    )
    drops: list[float] = setting(list, "Shares of the run, as [0.3, 0.6, 0.9], for decay=drops.")
    warmup: Length = _length("10000 steps", "Linear warm-up from 0.")
    final: float = setting(0.0, "Learning rate at the end, as a share of the peak.")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    zero_stage: Literal[0, 1, 2, 3] = setting(1, "DeepSpeed ZeRO stage: what is sharded over ranks.")
    precision: TrainPrecision = setting(
        "bf16", "Of weights and activations; master weights and moments are fp32. fp16, for old GPUs, scales the loss."
    )
    offload: bool = setting(
        False, "Keep the optimizer's state in host memory, and step there: less GPU memory, slower."
    )
    compile: bool = setting(False, "torch.compile the model: minutes at the start, for speed on a GPU.")
    activation_checkpointing: bool = setting(False, "Recompute blocks in the backward pass: less memory, 1/3 slower.")
    peak_tflops: float = setting(0.0, "Peak of one device, for MFU; 0 looks it up, or measures it on unknown devices.")
    timeout_minutes: float = setting(
        10.0, "How long a collective may wait for a rank before the run fails.", most=MINUTES_OF_A_YEAR
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    every: Length = _length("5%", "Between evaluations during training; one is always made at the end.")
    batch: int = setting(64, "Images per forward pass of one rank.", most=MAX_BATCH)


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """What is asked of features without training: few-shot linear accuracy, and that of nearest neighbours."""

    train_split: str = setting("train", "Split that the few shots and the neighbours are chosen from.")
    shots: list[int] = setting(
        [5], "Few-shot linear accuracy of the features, with so many images of each class, as [1,5,10,25]; 0 is none."
    )
    shots_seeds: int = setting(3, "Choices of these images, seeds 0, 1, ...; the mean is the score.", most=1_000)
    l2: list[float] = setting(
        [1024.0], "Strengths of the few-shot ridge regression (2^10 is big_vision's); each is told."
    )
    neighbours: int = setting(0, "kNN accuracy of the features, with the votes of so many (20 is DINO's); 0 is none.")
    temperature: float = setting(0.07, "Of kNN: a neighbour's vote is exp(cosine / temperature).")
    neighbour_images: int = setting(50_000, "Training images, chosen at random, that neighbours are among; 0 is all.")

    @property
    def probes(self) -> bool:
        """Whether there is anything to ask."""
        return any(self.shots) or self.neighbours > 0

    def check_probe(self, prefix: str, split: str) -> None:
        """Refuse what cannot work; prefix: of the settings' names, split: the one tested on. Raises UserError."""
        not_negative = {"shots": min(self.shots, default=0), "neighbours": self.neighbours,
                        "neighbour_images": self.neighbour_images}  # fmt: skip
        for name, value in not_negative.items():
            if value < 0:
                raise UserError(f"{prefix}{name} = {value} must not be negative.")
        if self.shots_seeds < 1:
            raise UserError(f"{prefix}shots_seeds = {self.shots_seeds} must be at least 1.")
        if any(self.shots) and (not self.l2 or min(self.l2) <= 0):
            raise UserError(f"{prefix}l2 = {quoted(self.l2)} must be numbers greater than 0.")
        if self.temperature <= 0:
            raise UserError(f"{prefix}temperature = {self.temperature} must be greater than 0.")
        if self.probes and self.train_split == split:
            raise UserError(
                f"{prefix}train_split = {prefix}split = {split}: features would be tested on what they are fitted to. "
                f"Use another {prefix}train_split, or {prefix}shots=0 {prefix}neighbours=0."
            )


@dataclass(frozen=True, kw_only=True)
class RunProbeConfig(ProbeConfig):
    every: Length = _length("0 steps", "Between probes of the features during training, and one at the end; 0 is none.")
    data: str = setting("", "Folder or URL of the data set they are made on; empty is the run's own.")
    split: str = setting("val", "Split that they are tested on.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Length = _length("2%", "Between checkpoints; one is always made at the end.")
    keep: int = setting(2, "How many of the newest checkpoints stay.")
    keep_every: Length = _length("0 steps", "Between checkpoints that stay for good, beside the newest; 0 is none.")
    best: str = setting("", "Metric of the evaluation (val_top1, val_loss) whose best checkpoint stays; empty is none.")
    folder: str = setting(
        "",
        "Folder or URL (s3://, gs://) for checkpoints, in <folder>/<name>; empty is <out>/<name>/checkpoints.",
        output="folder",
    )


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    on_spike: Literal["say", "skip", "rollback"] = setting(
        "say",
        "A loss far above those before it: say so; or do not take that step (ranks then agree on each step's loss before "
        "its backward pass); or go back to the checkpoint before it and leave out the data up to where it was noticed.",
    )
    spike_sigma: float = setting(6.0, "Standard deviations above the mean of the last losses that make a spike.")
    spike_window: int = setting(128, "How many steps' losses a loss is held against.", most=1_000_000)
    max_rollbacks: int = setting(3, "With on_spike=rollback: how often, before the run stops.")
    hang_minutes: float = setting(
        5.0,
        "A run that stands still so long says which rank, host and line of code it waits for, and ends; 0 is never.",
        most=MINUTES_OF_A_YEAR,
    )
    straggler_ratio: float = setting(
        1.5, "A rank whose data and forward passes take so many times the median rank's is named; 0 names none."
    )


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    trace_step: int = setting(
        0, "Record a torch.profiler trace from this step on (rank 0), into the run and MLflow; 0 is none."
    )
    trace_steps: int = setting(3, "How many steps the trace covers.", most=100_000)
    communication: bool = setting(
        False, "Time collectives, too; each then waits for its end, which costs their overlap."
    )


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    weights: str | None = setting(
        None, "Start from these weights: a run, a checkpoint, our .pt, or of others (docs/weights.md)."
    )
    new_head: bool = setting(True, "With init.weights: replace the head by one zero-initialised linear layer.")


@dataclass(frozen=True, kw_only=True)
class TrackConfig:
    enabled: bool = setting(True, "Send parameters and metrics to MLflow (metrics.jsonl is always written).")
    uri: str = setting("", "MLflow tracking URI; empty is sqlite:///<out>/mlflow.db.")
    experiment: str = setting("vit", "MLflow experiment.")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    env: str = setting(
        "NCCL_* GLOO_* AWS_* GOOGLE_* MLFLOW_* OMP_NUM_THREADS DS_ACCELERATOR TORCH_EXTENSIONS_DIR",
        "What of the environment reaches every host (launch/hosts.py): names with * for any, or NAME=value; a secret "
        "belongs into the environment, since settings are shown.",
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run: pre-training, or fine-tuning when init.weights is set."""

    name: str = setting(REQUIRED, "Name of the run; its folder is <out>/<name>", output="folder", within="out")
    out: str = setting("runs", "Folder that holds all runs.", output="folder")
    seed: int = setting(0, "All randomness follows from it.", most=MAX_SEED)
    model: ModelConfig = setting(ModelConfig, "")
    data: DataConfig = setting(DataConfig, "")
    augment: AugmentConfig = setting(AugmentConfig, "")
    train: TrainConfig = setting(TrainConfig, "")
    optimizer: OptimizerConfig = setting(OptimizerConfig, "")
    schedule: ScheduleConfig = setting(ScheduleConfig, "")
    engine: EngineConfig = setting(EngineConfig, "")
    evaluate: EvaluateConfig = setting(EvaluateConfig, "")
    probe: RunProbeConfig = setting(RunProbeConfig, "")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "")
    health: HealthConfig = setting(HealthConfig, "")
    profile: ProfileConfig = setting(ProfileConfig, "")
    init: InitConfig = setting(InitConfig, "")
    track: TrackConfig = setting(TrackConfig, "")
    launch: LaunchConfig = setting(LaunchConfig, "")

    def check(self) -> None:
        """Refuse what cannot work, with the arithmetic. Raises UserError."""
        positive = {
            "model.image_size": min(self.model.image_size), "data.streams": self.data.streams,
            "data.window": self.data.window, "data.threads": self.data.threads, "data.prefetch": self.data.prefetch,
            "train.global_batch": self.train.global_batch, "train.micro_batch": self.train.micro_batch,
            "train.log_every": self.train.log_every, "optimizer.lr": self.optimizer.lr,
            "profile.trace_steps": self.profile.trace_steps, "evaluate.batch": self.evaluate.batch, "checkpoint.keep": self.checkpoint.keep,
            "train.length": self.train.length.amount, "engine.timeout_minutes": self.engine.timeout_minutes,
            "evaluate.every": self.evaluate.every.amount, "checkpoint.every": self.checkpoint.every.amount,
            "health.spike_sigma": self.health.spike_sigma, "optimizer.eps": self.optimizer.eps, "data.cache_gb": self.data.cache_gb,
        }  # fmt: skip
        for name, value in positive.items():
            if value <= 0:
                raise UserError(f"{name} = {value} must be greater than 0.")
        not_negative = {
            "seed": self.seed, "optimizer.weight_decay": self.optimizer.weight_decay,
            "optimizer.clip": self.optimizer.clip, "engine.peak_tflops": self.engine.peak_tflops,
            "train.max_skipped_steps": self.train.max_skipped_steps,
            "train.stop_after_minutes": self.train.stop_after_minutes, "data.retry_minutes": self.data.retry_minutes,
            "augment.randaugment_layers": self.augment.randaugment_layers,
            "checkpoint.keep_every": self.checkpoint.keep_every.amount, "probe.every": self.probe.every.amount,
            "profile.trace_step": self.profile.trace_step, "health.max_rollbacks": self.health.max_rollbacks, "health.hang_minutes": self.health.hang_minutes,
            "health.straggler_ratio": self.health.straggler_ratio, "optimizer.lr_batch": self.optimizer.lr_batch,
        }  # fmt: skip
        for name, value in not_negative.items():
            if value < 0:
                raise UserError(f"{name} = {value} must not be negative.")
        below_one = {"optimizer.beta1": self.optimizer.beta1, "optimizer.beta2": self.optimizer.beta2,
                     "optimizer.ema_decay": self.optimizer.ema_decay,
                     "optimizer.momentum": self.optimizer.momentum}  # fmt: skip
        for name, value in below_one.items():
            if not 0 <= value < 1:
                raise UserError(f"{name} = {value} must be at least 0 and below 1.")
        if 0 < self.train.stop_after_minutes <= 0.5:
            raise UserError(
                f"train.stop_after_minutes = {self.train.stop_after_minutes:g} leaves nothing to train: 30 s of it are for "
                "the commit and the exit, and more where commits take longer."
            )
        shares = {"model.dropout": self.model.dropout, "model.drop_path": self.model.drop_path,
                  "train.label_smoothing": self.train.label_smoothing,
                  "data.max_bad_share": self.data.max_bad_share, "data.dev_share": self.data.dev_share, "schedule.final": self.schedule.final,
                  "augment.color_jitter": self.augment.color_jitter, "augment.erase": self.augment.erase,
                  "augment.mixup": self.augment.mixup, "augment.cutmix": self.augment.cutmix}  # fmt: skip
        for name, value in shares.items():
            if not 0 <= value <= 1:
                raise UserError(f"{name} = {value} must be between 0 and 1.")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UserError(f"name = {quoted(self.name)} must be a plain folder name.")
        if not 0 < self.augment.area_min <= self.augment.area_max <= 1:
            raise UserError(
                f"augment.area_min = {self.augment.area_min} and augment.area_max = {self.augment.area_max} "
                "must satisfy 0 < area_min <= area_max <= 1."
            )
        if not 0 < self.augment.aspect_min <= self.augment.aspect_max:
            raise UserError(
                f"augment.aspect_min = {self.augment.aspect_min} and augment.aspect_max = {self.augment.aspect_max} "
                "must satisfy 0 < aspect_min <= aspect_max."
            )
        idle = {"area_min": "inception", "area_max": "inception", "aspect_min": "inception", "aspect_max": "inception",
                "resize_to": "resize_crop or resize_small_crop"}  # fmt: skip
        for name, crop in idle.items():
            value, default = getattr(self.augment, name), getattr(AugmentConfig(), name)
            if value != default and self.augment.crop not in crop.split(" or "):
                raise UserError(
                    f"augment.{name} = {value} is of augment.crop={crop}, and does nothing with {self.augment.crop}. Leave it "
                    f"at {default}."
                )
        if self.augment.eval_resize and self.augment.eval_crop == "resize":
            raise UserError("augment.eval_resize does nothing with augment.eval_crop=resize. Leave it at 0.")
        if not 0 <= self.augment.randaugment_magnitude <= 20:
            raise UserError(
                f"augment.randaugment_magnitude = {self.augment.randaugment_magnitude} must be from 0 to 20."
            )
        for name, size in (
            ("augment.resize_to", self.augment.resize_to),
            ("augment.eval_resize", self.augment.eval_resize),
        ):
            if size and size < min(self.model.image_size):
                raise UserError(f"{name} = {size} is smaller than model.image_size = {self.model.image_size}.")
        if (self.model.name is None) == (self.init.weights is None):
            raise UserError(
                "set model.name for a new model, or init.weights to go on from weights, which bring their architecture: "
                f"now model.name = {quoted(self.model.name)}, init.weights = {quoted(self.init.weights)}."
            )
        if self.init.weights is not None:
            # What starts from weights may change its size and how it is regularised; the rest would be ignored.
            free = ("name", "image_size", "dropout", "drop_path")
            given = {f.name: getattr(self.model, f.name) for f in fields(ModelConfig) if f.name not in free}
            if other := [f"model.{name}" for name, value in given.items() if value != getattr(ModelConfig(), name)]:
                raise UserError(f"init.weights brings its architecture: leave out {', '.join(other)}.")
        if self.train.global_batch % self.data.streams:
            raise UserError(
                f"train.global_batch = {self.train.global_batch} is not divisible by data.streams = "
                f"{self.data.streams}. Use data.streams={math.gcd(self.train.global_batch, self.data.streams)}."
            )
        names = ("loss",) if self.train.masked else ("top1", "top5", "loss")
        if self.data.dev_share >= 1:
            raise UserError(
                f"data.dev_share = {self.data.dev_share} must be below 1: something must be left to train on."
            )
        metrics = [f"{self.data.evaluated_split}_{name}" for name in names]
        if self.checkpoint.best and self.checkpoint.best not in metrics:
            raise UserError(f"checkpoint.best = {quoted(self.checkpoint.best)} must be one of {', '.join(metrics)}.")
        if self.probe.every.amount and self.train.masked:
            raise UserError(
                f"probe.every is set, and train.loss = {self.train.loss} trains a model that reads corrupted images. Probe "
                "its checkpoints: launch/evaluate.py."
            )
        if self.probe.every.amount:
            self.probe.check_probe("probe.", self.probe.split)
            if not self.probe.probes:
                raise UserError("probe.every is set with probe.shots=0 and probe.neighbours=0: set one of them.")
        if self.health.spike_window < 8:
            raise UserError(
                f"health.spike_window = {self.health.spike_window} must be at least 8 to tell a spike from noise."
            )
        if self.health.hang_minutes >= self.engine.timeout_minutes:
            raise UserError(
                f"health.hang_minutes = {self.health.hang_minutes} must be below engine.timeout_minutes = "
                f"{self.engine.timeout_minutes}, after which the waiting ranks die without saying whom they wait for."
            )
        drops = self.schedule.drops
        if (self.schedule.decay == "drops") != bool(drops) or not all(0 < drop < 1 for drop in drops):
            raise UserError(
                f"schedule.decay = {self.schedule.decay} with schedule.drops = {quoted(drops)}: decay=drops needs shares of the "
                "run between 0 and 1, as schedule.drops=[0.3,0.6,0.9], and no other decay takes any."
            )
        if self.train.label_smoothing and self.train.loss != "softmax":
            raise UserError("train.label_smoothing needs train.loss=softmax.")
        if self.train.masked and (self.augment.mixup or self.augment.cutmix):
            raise UserError(
                f"train.loss = {self.train.loss} reads no labels: leave out augment.mixup and augment.cutmix."
            )
        if self.train.masked and self.init.weights is not None:
            raise UserError(
                f"train.loss = {self.train.loss} begins with a new model: set model.name, and leave out init.weights. What it "
                "has learned is fine-tuned by launch/finetune.py with train.loss=softmax."
            )
        if self.engine.precision != "fp32" and self.engine.zero_stage == 0:
            raise UserError(
                f"engine.precision = {self.engine.precision} with engine.zero_stage = 0 takes a wrong first Adam step in "
                "DeepSpeed. Use engine.zero_stage=1 (same memory on one rank) or engine.precision=fp32."
            )
        if self.engine.offload and self.engine.zero_stage == 0:
            raise UserError("engine.offload needs engine.zero_stage=1, 2 or 3: at stage 0 nothing is kept apart.")
