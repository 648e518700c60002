"""The settings of a run: its sections, then `RunConfig`, which has them all, and the checks that cross several of them.

`--help` of launch/pretrain.py prints every field; `configs/` holds the shipped files. Checks that need the data set or
the number of ranks are in `pipeline/estimate/plan.py`, those of an objective in its class.
"""

import math
import os.path
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pipeline.architecture.config import ONLY_TRAIN, Gelu, Pool, Positions, QkvBias
from pipeline.architecture.objectives import OBJECTIVES, Labels
from pipeline.architecture.variants import implied
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.metric import SPREAD, Metric
from pipeline.process.outputs import Holds
from pipeline.settings.quantities import (
    MINUTES_PER_YEAR,
    Batch,
    ImageSize,
    Length,
    Limit,
    LogInterval,
    PathText,
    PositiveShare,
    Seed,
    Share,
    ShareBelow1,
    Side,
    Threads,
    one_of,
)
from pipeline.settings.schema import Distinct, Settings, refuse_without_effect, setting

if TYPE_CHECKING:
    from pipeline.architecture.pixels import Pixels

Precision = Literal["fp32", "bf16"]
TrainPrecision = Literal["fp32", "bf16", "fp16"]
# What settings need of training crops that choose a box of the image, and of those that resize it first.
_BOX, _RESIZE = "crop=inception,random_resized", "crop=resize_crop,resize_small_crop"
# Augmentations that are defined for 8-bit RGB only.
_OF_COLOURS = ("color_jitter", "saturation", "hue", "three_augment", "grey", "solarise", "randaugment_layers")

_FREEZE_ALL_BLOCKS = ("backbone", "encoder")  # values of train.freeze


def result_name(holds: Holds, **rule: Any) -> Any:
    """The name of a result, whose folder is in `out`."""
    return setting(pattern="^[^./][^/]*$", output="folder", within="out", holds=holds, **rule)


def minutes(default: float, **rule: Any) -> Any:
    """A limit of time, which changes no result."""
    return setting(default, **{"min": 0, "max": MINUTES_PER_YEAR, "on_change": "nothing", **rule})


class ModelConfig(Settings):
    """The model: its name, its image size, and what a run may set of `ViTConfig`; of a ResNet the width and head_bias,
    which a ViT has too.
    """

    name: str | None = None
    """Architecture: a size (Ti, S, M, B, L, So400m, H, g, G, e) and a patch side, as ViT-L/16; or Axial-ViT-B/16,
    R50+ViT-B/16, BiT-R50x1. Leave it out with init.weights.
    """
    image_size: ImageSize = ImageSize(224, 224)
    """Input size in pixels: side of a square, or height x width."""
    width: PositiveInt | None = None
    """Overrides the variant's width D; for a ResNet, the channels of its first layer."""
    depth: PositiveInt | None = None
    """Overrides the variant's number of blocks."""
    mlp_width: PositiveInt | None = None
    """Overrides the variant's MLP width."""
    num_heads: PositiveInt | None = None
    """Overrides the variant's number of heads."""
    positions: Positions = "learned"
    """Position embedding: learned 1-D or 2-D, fixed sine-cosine (with MAE's frequencies: sincos2d_mae), relative
    attention, or none.
    """
    positions_at: Literal["stem", "blocks", "shared"] = "stem"
    """Where positions are added: once (stem), before every block with a table for each (blocks), or before every block
    with the same table (shared).
    """
    pool: Pool | None = None
    """Input of the head: class token; global average pool or attention pool (map) of a model without class token; or,
    beside a class token, the mean of the patches (mean), token and mean (both), or an attention pool (attentive). null
    is token (axial models: gap).
    """
    representation: bool = True
    """Add a dense + tanh layer before the head (pre-training only); most objectives without labels train none,
    whatever is set.
    """
    gelu: Gelu = "tanh"
    """GELU: tanh approximation (official code), exact (erf), or x sigmoid(1.702 x) (quick, CLIP)."""
    dropout: ShareBelow1 = 0.0
    """Dropout after positions, attention output and MLP layers (0.1 on ImageNet-21k)."""
    drop_path: ShareBelow1 = 0.0
    """Stochastic depth: drop probability of the last block, linear from 0."""
    head_bias: float = setting(0.0, min=-1000)
    """Initial bias of the head; -10 suits sigmoid loss on 21k classes."""
    registers: NonNegativeInt = 0
    """Extra learned tokens without a position, which the head does not read; 4 in DINOv2."""
    layer_scale: float | None = setting(None, min=-1000)
    """Initial value of LayerScale, learned factors of each residual branch; 1e-5 in DINOv2; null: no factors."""
    swiglu: bool = False
    """Gated MLP: silu(gate) times value, each mlp_width wide (DINOv2's g, DINOv3's H+ and 7B)."""
    rope_base: float | None = setting(None, above=1)
    """Base period of rotary positions of queries and keys (RoPE), for any image size; 100 in DINOv3; null: no rotation.
    """
    qkv_bias: QkvBias = "qkv"
    """Which of queries, keys and values have a bias; qv in DINOv3."""
    out_bias: bool = True
    """Bias of the attention's output layer."""
    mlp_bias: bool = True
    """Biases of the MLP's layers."""
    embedding_norm: bool = False
    """LayerNorm of all tokens before the first block, as in CLIP."""
    qk_norm: bool = False
    """LayerNorm of each head's queries and keys (ViT-22B)."""
    pool_norm: bool = False
    """The final LayerNorm is of the mean of the patches, not of the tokens (pool=mean or gap), as MAE fine-tunes."""
    small_stem: list[int] | None = None
    """Hybrid for small images, as [32,64,128]: a 3 x 3 convolution, then a residual unit of two for each number of
    channels; where these grow, the map is halved. The patch side of model.name counts its cells (ViT-Ti/1).
    """

    @property
    def options(self) -> dict[str, Any]:
        """What these settings say of a model beside its name and image size: arguments of `configure`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "image_size")}

    def for_weights(self) -> dict[str, Any]:
        """The settings that a run may change for init.weights, except for the image size: they act in training only."""
        return {name: getattr(self, name) for name in ONLY_TRAIN}


class MixedSet(Settings):
    """A data set of a mixture, or another weight of one from a step on."""

    path: PathText
    """Folder or URL of a data set beside data.path"""
    weight: NonNegativeFloat
    """Its samples in a batch are in this proportion to those of data.path, data.weight"""
    split: str = "train"
    """Split to train on."""
    exclude: str = "all"
    """Lists of excluded samples: all, none, or names with commas."""
    limit: Limit = Limit.parse("100%")
    """Train on a random subset: a number of samples or a share."""
    labels: bool = True
    """Whether its labels are read. With train.loss=pseudo_labels, false makes its images unlabelled; data.path may then
    be named again.
    """
    from_step: NonNegativeInt = 0
    """Step from which the set has this weight. An entry with the path, split and labels of an earlier one changes its
    weight.
    """

    @property
    def name(self) -> tuple[str, str, bool]:
        """What identifies a set: path, split, and whether its labels are read."""
        return self.path.rstrip("/"), self.split, self.labels


class DataConfig(Settings):
    path: PathText = setting(on_change="comparison")
    """Folder or URL (s3://, gs://) of a data set, made by launch/shard.py, or a folder of images, which is sharded once
    into <folder>_shards
    """
    cache: PathText = setting("", output="folder", on_change="nothing")
    """Folder on a local disk that caches shards of a bucket, shared by the ranks of a node; empty: no cache."""
    cache_gb: PositiveFloat = setting(200.0, on_change="nothing", needs="cache")
    """Maximum size of data.cache in GB; least recently read shards are removed."""
    retry_minutes: float = minutes(10.0)
    """Minutes for which a failed bucket request is retried before the run stops; the watchdog allows such a wait."""
    train_split: str = setting("train", on_change="run")
    """Split to train on."""
    eval_split: str = "val"
    """Split to evaluate on; empty: none. Without labels, val is none if there is no such split."""
    eval_also: str = setting("", on_change="comparison")
    """Further splits of data.path to evaluate on, with commas between; their metrics begin with the split's name."""
    exclude: str = "all"
    """Lists of excluded samples (exclude/*.parquet): all, none, or names with commas."""
    limit: Limit = setting(Limit.parse("100%"), on_change="run")
    """Train on a random subset: a number of samples or a share. Larger subsets contain the smaller ones."""
    dev_share: ShareBelow1 = 0.0
    """Share of the training samples held out at random as split 'dev', which is then evaluated instead of
    data.eval_split, to choose settings by; of samples with groups, whole groups. 0: none.
    """
    weight: PositiveFloat = setting(1.0, on_change="comparison", needs="mix")
    """In a mixture: the samples of data.path in a batch are in this proportion to those of each set of data.mix."""
    mix: list[MixedSet] = setting(list, on_change="comparison")
    """Data sets that are trained on beside data.path, as [{path: datasets/b, weight: 0.5}] (docs/mixtures.md)."""
    streams: PositiveInt = setting(16, on_change="run")
    """Number of equal streams that an epoch is divided into; must divide train.global_batch. More mix better."""
    window: PositiveInt = setting(4096, on_change="run")
    """Number of consecutive samples of a stream that are shuffled together."""
    balance: Share = setting(1.0, on_change="run")
    """Draw classes with probability proportional to their number of samples to this power: 1 takes each sample once an
    epoch, 0 all classes equally often, 0.5 is between. A sample's class is its first label.
    """
    targets: Distinct[str] = setting(list, on_change="run")
    """train.loss=regression: which numbers of the data set to learn (target_columns of launch/shard.py); empty is all.
    """
    threads: Threads = setting(2, on_change="nothing")
    """Decoding threads of each rank."""
    processes: NonNegativeInt = setting(0, on_change="nothing")
    """Decode training images in so many processes of each rank instead of data.threads threads; of local files only.
    For small images, whose decoding mostly holds Python's lock (docs/performance.md); the batches are the same.
    """
    prefetch: PositiveInt = setting(4, on_change="nothing")
    """Number of micro-batches decoded ahead."""
    max_bad_share: Share = setting(0.001, on_change="comparison")
    """Share of unreadable images, of those trained on or of those scored, above which the run stops."""

    @property
    def evaluated(self) -> list[str]:
        """Splits of data.path that the run is evaluated on, by which the names of metrics begin.

        The first is the main one: of its predictions are figures and scores.json.
        """
        return list(dict.fromkeys(filter(None, [self.evaluated_split, *map(str.strip, self.eval_also.split(","))])))

    @property
    def evaluated_split(self) -> str:
        """The main split that is evaluated, "" for none."""
        return "dev" if self.dev_share else self.eval_split

    @property
    def target_names(self) -> list[str]:
        """data.targets; one without a name if it is not known yet which there are."""
        return self.targets or [""]


class AugmentConfig(Settings):
    """Augmentation and preprocessing. The default of a new field must leave images as they are without it."""

    crop: Literal["inception", "random_resized", "resize_crop", "resize_small_crop", "none"] = "inception"
    """Training crop: random area and aspect ratio, as TensorFlow (inception) or torchvision's RandomResizedCrop, with a
    log-uniform aspect (random_resized); random crop after resizing the whole image (resize_crop) or its short side
    (resize_small_crop) to augment.resize_to; or only a resize (none).
    """
    area_min: PositiveShare = setting(0.05, needs=_BOX)
    """inception, random_resized: smallest part of the area."""
    area_max: PositiveShare = setting(1.0, needs=_BOX)
    """inception, random_resized: largest part of the area."""
    aspect_min: PositiveFloat = setting(3 / 4, needs=_BOX)
    """inception, random_resized: smallest width / height."""
    aspect_max: PositiveFloat = setting(4 / 3, needs=_BOX)
    """inception, random_resized: largest width / height."""
    resize_to: Side = setting(0, needs=_RESIZE)
    """resize_crop, resize_small_crop: size before the crop; 0 is 7/6 of image_size (448 for 384), with augment.padding
    image_size.
    """
    padding: Side = setting(0, needs=_RESIZE)
    """resize_crop, resize_small_crop: pixels of its own reflection that are put around the image before the crop; 4 in
    DeiT III's simple crop and for CIFAR-10.
    """
    flip: bool = True
    """Flip horizontally with probability 0.5."""
    flip_vertical: bool = False
    """Flip vertically with probability 0.5, for images without an up and down."""
    turns: bool = False
    """Turn by 0, 90, 180 or 270 degrees, each with probability 0.25; square views only."""
    resize_filter: Literal["linear", "antialias", "bilinear", "bicubic"] = setting("linear", ignores_section=True)
    """linear: bilinear without antialias in training, as the papers' code (in resize_small_crop area), and area in
    evaluation; antialias: Pillow's bilinear; bilinear: bilinear without antialias in both; bicubic: Pillow's bicubic,
    with antialias.
    """
    color_jitter: Share = 0.0
    """Multiply brightness, contrast and saturation by random factors from 1 - color_jitter to 1 + color_jitter."""
    saturation: Share = 0.0
    """Colour jitter: another strength for saturation (0.2 in DINO); 0 is color_jitter."""
    hue: float = setting(0.0, min=0, max=0.5)
    """Colour jitter: turn hues by a random share of the circle, at most this (0.1 in DINO)."""
    color_jitter_probability: Share = setting(1.0, needs="color_jitter|saturation|hue")
    """Probability of colour jitter (0.8 in DINO)."""
    channel_brightness: Share = 0.0
    """Multiply the values of each channel, above its low end, by a random factor of its own, from 1 -
    channel_brightness to 1 + channel_brightness.
    """
    channel_contrast: Share = 0.0
    """The same for their distances from the channel's mean in the view, by factors from 1 - channel_contrast."""
    three_augment: Share = 0.0
    """Probability of 3-Augment (1 in DeiT III): makes an image grey, or solarises it, or blurs it, each with a third of
    it, before the colour jitter.
    """
    grey: Share = 0.0
    """Probability of making a view grey."""
    blur: Share = 0.0
    """Probability of a Gaussian blur with a standard deviation from 0.1 to 2 pixels."""
    solarise: Share = 0.0
    """Probability of inverting values of 128 and above."""
    randaugment_layers: NonNegativeInt = 0
    """RandAugment's N: random operations per image (2 in the recipes)."""
    randaugment_magnitude: float = setting(10.0, min=0, max=20, needs="randaugment_layers")
    """RandAugment's M: strength of the operations."""
    randaugment_contrast: Literal["mean", "pixel_count"] = setting("mean", needs="randaugment_layers")
    """Grey value that RandAugment's Contrast blends with: the image's mean, or height x width / 256 (196 at 224 px), as
    in the published AugReg and big_vision runs.
    """
    noise: Share = 0.0
    """Add normal noise to each value, with a standard deviation that is drawn for each view, from 0 to this share of
    the channel's range.
    """
    erase: Share = 0.0
    """Random erasing: probability of replacing 2 to 33 % of the image by noise."""
    drop_channels: Share = 0.0
    """Probability with which each channel is replaced by its low end, black; one is always left."""
    mixup: Share = 0.0
    """Mixup of image pairs and labels, with a weight from Beta(mixup, mixup) per step."""
    cutmix: Share = 0.0
    """CutMix: swap a box between pairs, its area from Beta(cutmix, cutmix); if mixup is set too, each step uses one of
    the two.
    """
    eval_resize: Side = setting(0, ignores_section=True, needs="eval_crop=center,resize_center")
    """Evaluation: size before the central crop; 0 is 8/7 of model.image_size (256 for 224)."""
    eval_crop: Literal["center", "resize", "resize_center"] = setting("center", ignores_section=True)
    """Evaluation: resize the short side to eval_resize and crop the centre (center); resize the whole image (resize);
    or resize the whole image to eval_resize and crop the centre (resize_center, big_vision's few-shot).
    """

    def check_views(self, size: ImageSize, pixels: "Pixels") -> None:
        """Raise UserError for augmentations that views of this size and these pixels cannot have."""
        if self.turns and size.height != size.width:
            raise UserError(f"augment.turns = true turns views by 90 degrees, and they are {size}: use a square size.")
        if self.drop_channels and pixels.num_channels == 1:
            raise UserError(
                f"augment.drop_channels = {self.drop_channels} needs several channels, and images have one."
            )
        if not pixels.is_rgb8 and (given := [name for name in _OF_COLOURS if getattr(self, name)]):
            dino = " (of train.loss=dino: objective.solarise=[0,0,0])" if "solarise" in given else ""
            raise UserError(
                f"{', '.join(f'augment.{name}' for name in given)}{dino}: only for 8-bit RGB, and images have"
                f" {pixels.describe()}. Set to 0, or use channel_brightness, channel_contrast, noise, blur, erase or"
                " drop_channels, which are for any images."
            )

    @property
    def mixes_pairs(self) -> bool:
        return bool(self.mixup or self.cutmix)


class TrainConfig(Settings):
    length: Length = setting(on_change="comparison")
    """Length of the run, for example '90 epochs'; '0 steps' with init.fit_head trains no further"""
    global_batch: Batch = setting(4096, on_change="run")
    """Samples per optimizer step, over all ranks."""
    micro_batch: Batch = setting(64, on_change="comparison")
    """Samples per forward pass of one rank; determines accumulation."""
    loss: Annotated[str, one_of(OBJECTIVES)] = setting("sigmoid", choices=OBJECTIVES, on_change="run")
    """Cross-entropy of class labels, over softmax or summed over sigmoids; numbers, such as an age (regression); or
    without labels: self-distillation (dino), prediction between views with normal projections (lejepa), two views of an
    image among those of others (simclr), a masked autoencoder (mae), prediction of the features (distill) or the
    classes (distill_classes) of published weights, or masked patch prediction of the mean colour of half of the patches
    (512 colours), of 4 x 4 such colours, or of the pixels; or of few labels and of what an average of the weights is
    sure of in images without one (pseudo_labels).
    """
    freeze: str = setting("none", pattern=r"^(none|backbone|encoder|(all but )?[1-9]\d{0,3} blocks?)$", on_change="run")
    """With init.weights, what is not trained: nothing (none), all but the head (backbone), all but the head and the
    attention pool that it reads (encoder), or what comes before the first block and so many first blocks (8 blocks),
    or all but so many last ones (all but 2 blocks).
    """
    heads_first: Length = setting(Length.parse("0 steps"), on_change="run")
    """With init.weights: how long only what is new is trained, in the unit of train.length or %: heads, and for images
    that are not 8-bit RGB the first layer. Evaluations and probes are repeated at its end.
    """
    lora_rank: NonNegativeInt = setting(0, on_change="run")
    """With train.freeze=backbone: rank of the trained changes of train.lora_layers (LoRA), which are added to the
    weights that are scored and exported. 0 turns LoRA off.
    """
    lora_alpha: PositiveFloat = setting(
        16.0,
        needs="lora_rank",
        on_change="run",  # A checkpoint holds the factor.
    )
    """LoRA: the changes are multiplied by lora_alpha / lora_rank."""
    lora_layers: list[str] = setting(["qkv", "out"], min_items=1, needs="lora_rank", on_change="run")
    """LoRA: dense layers of each block: qkv, out, up, down."""
    label_smoothing: Share = setting(0.0, needs="loss=softmax,pseudo_labels")
    """Softmax: share of the target spread over all classes."""
    log_every: LogInterval = setting(LogInterval.parse("10 s"), above=0, on_change="nothing")
    """Interval between log lines, in seconds or steps ('50 steps'). Metrics are recorded at the same steps or, with
    seconds, every 1% of the run and at least every 50 steps: what a run records does not depend on its speed.
    """
    max_skipped_steps: NonNegativeInt = setting(20, on_change="comparison")
    """Steps skipped for non-finite gradients, above which the run stops."""
    stop_after_minutes: float = minutes(0.0)
    """Wall-clock limit of each start, including the final checkpoint: the run exits in time with code 75. 0: none."""


class OptimizerConfig(Settings):
    name: Literal["adam", "sgd", "muon"] = setting("adam", on_change="run")
    """Adam with decoupled weight decay, SGD with momentum, or Muon for the kernels of hidden layers with Adam for the
    rest.
    """
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    lr_batch: NonNegativeInt = 0
    """Batch size that lr is meant for: lr is multiplied by train.global_batch / lr_batch. 0 uses lr as it is."""
    beta1: ShareBelow1 = setting(0.9, needs="name=adam,muon")
    """Adam: decay of the first moment."""
    beta2: ShareBelow1 = setting(0.999, needs="name=adam,muon")
    """Adam: decay of the second moment."""
    eps: PositiveFloat = setting(1e-8, needs="name=adam,muon")
    """Adam: term added to the denominator."""
    momentum: ShareBelow1 = setting(0.9, needs="name=sgd")
    """SGD: momentum."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of dense kernels, multiplied by the learning rate; Adam, Muon: decoupled, SGD: added to the
    gradient.
    """
    weight_decay_end: NonNegativeFloat | None = None
    """Weight decay at the end of the run, which it approaches along half a cosine. null keeps it constant."""
    layer_decay: PositiveShare = 1.0
    """Factor by which each block learns more slowly than the next one, such as 0.75 for fine-tuning; what comes before
    the first block is the slowest.
    """
    clip: NonNegativeFloat = 1.0
    """Clip gradients to this global norm; 0 turns clipping off."""
    ema_decay: ShareBelow1 = 0.0
    """Decay of an exponential moving average of the weights (Polyak averaging), such as 0.9999; the average is then
    evaluated and exported. 0 turns it off.
    """


class ScheduleConfig(Settings):
    decay: Literal["linear", "cosine", "constant", "drops"] = "linear"
    """Learning rate after warm-up; drops divides it by 10 at each of schedule.drops."""
    drops: list[Annotated[float, Field(gt=0, lt=1)]] = []
    """With decay=drops: points of the run as shares of its length, as [0.3, 0.6, 0.9]."""
    warmup: Length = Length.parse("10000 steps")
    """Linear warm-up from 0."""
    final: Share = setting(0.0, needs="decay=linear,cosine,drops|cooldown")
    """Learning rate at the end, as a share of the peak; none with decay=constant without a cooldown."""

    def check_decay(self, prefix: str) -> None:
        """Raise UserError unless drops are set if and only if decay=drops. prefix: of the settings' names."""
        if (self.decay == "drops") != bool(self.drops):
            raise UserError(
                f"{prefix}decay = {self.decay} with {prefix}drops = {quoted(self.drops)}: decay=drops needs shares of"
                f" the run, as {prefix}drops=[0.3,0.6,0.9], and other decays take none."
            )


class RunScheduleConfig(ScheduleConfig):
    cooldown: Length = Length.parse("0 steps")
    """With decay=constant: last part of the run, in which the rate falls linearly to schedule.final; 0: none. Until it
    begins, runs of any length are the same, so launch/study.py trains them once.
    """

    def check_decay(self, prefix: str) -> None:
        """Check as above, and refuse a cooldown of a rate that falls anyway. Raises UserError."""
        super().check_decay(prefix)
        if self.cooldown.amount and self.decay != "constant":
            raise UserError(f"{prefix}cooldown = {self.cooldown} needs {prefix}decay=constant, and it is {self.decay}.")


class EngineConfig(Settings):
    zero_stage: int = setting(1, min=0, max=3)
    """DeepSpeed ZeRO stage: 1 shards the optimizer's state over ranks, 2 also gradients, 3 also parameters."""
    precision: TrainPrecision = setting("bf16", on_change="result")
    """Precision of weights and activations; master weights and moments are fp32. fp16, for older GPUs, scales the loss.
    """
    offload: bool = False
    """Keep the optimizer's state and update in host memory: less GPU memory, but slower."""
    compile: bool = False
    """torch.compile each block of the model; blocks with the same shapes share their code. Losses change by rounding
    only, and dropout and stochastic depth draw other numbers. The model compiled as a whole was 6 % faster for ViT-L/16
    in bf16 on an H100; block by block is not measured.
    """
    fused: bool | None = None
    """Update all weights in one kernel, which rounds some of them otherwise than several do. null: on a GPU, unless
    offload is set.
    """
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, 1/3 slower."""
    deterministic: bool = True
    """On a GPU, use kernels that give the same bits each time: a resumed run then equals an uninterrupted one bit for
    bit. A CPU always does.
    """
    peak_tflops: NonNegativeFloat = setting(0.0, on_change="nothing")
    """Peak TFLOP/s of a device, for MFU; 0 looks it up on the data sheet."""


class EvaluateConfig(Settings):
    every: Length = setting(Length.parse("5%"), above=0)
    """Interval between evaluations; the last step always has one."""
    batch: Batch = 64
    """Images per forward pass of one rank."""
    mean_ap: bool = False
    """Images have several labels: the score is mAP, the mean over labels of the average precision. Each rank holds the
    probabilities of all classes for all images that are evaluated.
    """


class ProbeConfig(Settings):
    """Scores of features without training: few-shot linear and k-nearest-neighbour accuracy; without labels, RankMe."""

    train_split: str = setting("train", needs="shots|neighbours")
    """Split that few-shot images and neighbours are chosen from."""
    shots: list[NonNegativeInt] = [5]
    """Few-shot linear accuracy: images per class, as [1,5,10,25]; 0: off."""
    shots_seeds: PositiveInt = setting(3, needs="shots")
    """Random choices of few-shot images; the score is their mean."""
    l2: list[PositiveFloat] = setting([1024.0], min_items=1, needs="shots")
    """Strengths of the few-shot ridge regression (2^10 in big_vision); each is reported."""
    neighbours: NonNegativeInt = 0
    """kNN accuracy: number of neighbours that vote (20 in DINO); 0: off."""
    temperature: PositiveFloat = setting(0.07, needs="neighbours")
    """kNN: the weight of a vote is exp(cosine similarity / temperature)."""
    neighbour_images: NonNegativeInt = setting(50_000, needs="neighbours")
    """kNN: number of random training images to search; 0 is all."""

    rankme_images: NonNegativeInt = 0
    """RankMe and standard deviation of features, for which no labels are needed: number of random images, of the run's
    training split or of the split scored (2048, say; 25,600 in the paper); 0: off.
    """

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
    every: Length = Length.parse("0 steps")
    """Interval between probes, with one before the first step and one at the end; 0: off."""
    data: PathText = setting("", needs="shots|neighbours")
    """Folder or URL of the data set for probes; empty is the run's own. Several, with commas between, are each scored
    under their own name (own_20nn, old_20nn); the first one's scores are the run's.
    """
    split: str = "val"
    """Split that probes are tested on; several, with commas between, are those of the data sets in their order."""

    @property
    def tested(self) -> dict[str, tuple[str, str]]:
        """Name of each data set, with which its metrics begin, -> (path, split). The run's own has an empty path, and
        is named after the split. Raises UserError for names that are not distinct, and another number of splits.
        """
        paths = [os.path.expanduser(path.strip()) for path in self.data.split(",")]
        splits = [split.strip() for split in self.split.split(",")]
        if len(splits) == 1:
            splits *= len(paths)
        if len(splits) != len(paths):
            raise UserError(
                f"probe.split = {self.split} has {len(splits)} names, and probe.data {len(paths)}: give one split for"
                " all data sets, or one for each."
            )
        found: dict[str, tuple[str, str]] = {}
        for path, split in zip(paths, splits, strict=True):
            place = path.partition("?")[0] if "://" in path else path
            name = Path(place).resolve().name if path else split
            if name in found:
                raise UserError(
                    f"probe.data = {self.data}: two folders are named {name}, and so are their metrics: rename one."
                )
            found[name] = path, split
        return found

    def measured(self) -> dict[str, Metric]:
        return {name: metric for data in self.tested for name, metric in self.metrics(data).items()}


class CheckpointConfig(Settings):
    every: Length = setting(Length.parse("2%"), above=0)
    """Interval between checkpoints; the last step always has one."""
    keep: PositiveInt = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Length = Length.parse("0 steps")
    """Interval between permanently kept checkpoints; 0: none."""
    best: str = ""
    """Metric of an evaluation or a probe (val_top1, val_loss, val_20nn) whose best checkpoint is kept permanently;
    empty: none.
    """
    folder: PathText = setting("", output="folder or URL")
    """Folder or URL (s3://, gs://) for checkpoints, in <folder>/<name>; empty is <out>/<name>/checkpoints."""
    wait_minutes: float = minutes(30.0)
    """Minutes for which the watchdog lets training wait for a checkpoint to be committed, at the next one or at the
    end, or to be read when the run goes back to it; data.retry_minutes more if it is in a bucket.
    """


class HealthConfig(Settings):
    on_spike: Literal["warn", "rollback"] = "warn"
    """When the loss is far above recent losses: log it (warn); or return to the last checkpoint before it and skip the
    data since then (rollback).
    """
    spike_sigma: PositiveFloat = 6.0
    """A spike is this many standard deviations above the recent mean."""
    spike_window: int = setting(128, min=8)
    """Number of recent losses that a loss is compared with."""
    max_rollbacks: NonNegativeInt = setting(3, on_change="comparison", needs="on_spike=rollback")
    """With on_spike=rollback: number of rollbacks above which the run stops."""
    hang_minutes: float = minutes(5.0)
    """Minutes without progress after which the run reports the rank, host and line of code that it waits for, and ends;
    0 is never. Waits that may last do not count: of any rank for a bucket (data.retry_minutes) and for a checkpoint
    (checkpoint.wait_minutes).
    """
    straggler_ratio: NonNegativeFloat = setting(1.5, on_change="nothing")
    """Report a rank whose data loading and forward passes take this many times as long as the median rank's; 0 is
    never.
    """


class InitConfig(Settings):
    weights: PathText | None = None
    """Start from these weights: a run, a checkpoint, those of other projects, or OWNER/NAME on the Hugging Face hub
    (docs/weights.md).
    """
    new_head: bool = setting(True, needs="weights")
    """With init.weights: replace the head by a zero-initialised linear layer."""
    mean_pool: bool = setting(False, needs="weights")
    """With a new head: it reads the mean of the patches after a LayerNorm of its own, as MAE fine-tunes
    (model.pool_norm).
    """
    fit_head: bool = setting(False, needs="weights")
    """With a new head: before the first step it is fitted to the features of all training images (logistic regression,
    or ridge regression of numbers, its weight decay chosen on held-out fifths), and saved and scored as step 0. With
    train.length='0 steps', that is the whole run.
    """
    fit_views: PositiveInt = setting(1, needs="fit_head")
    """1: each image as it is evaluated. More: so many views of it as in training (augment), which help a few hundred
    images, and take so many times as long.
    """
    attentive_pool: bool = setting(False, needs="weights")
    """With a new head: it reads a new attention pool of all tokens. With train.freeze=encoder, an attentive probe."""


class TrackConfig(Settings):
    enabled: bool = True
    """Send parameters and metrics to MLflow (metrics.jsonl is always written)."""
    uri: str = ""
    """MLflow tracking URI; empty is sqlite:///<out>/mlflow.db."""
    experiment: str = "vit"
    """MLflow experiment."""
    figures: bool = True
    """Draw curves, confusions, predictions and reconstructions at evaluations, in a process of low priority, and
    attention at the end (docs/reviewing.md).
    """
    tensorboard: bool = False
    """Also write event files into tensorboard/ of the run folder, for `tensorboard --logdir <out>`."""
    parent_run: str = ""
    """ID of the MLflow run below which this one is shown, as launch/finetune_grid.py sets it; empty: none."""


class RunConfig(Settings):
    """A run: pre-training, or fine-tuning when init.weights is set."""

    # An override may turn off what settings of the file need, and config.yaml keeps both: they are a line of the log
    # and of the plan, not refused.
    notes_without_effect = True

    name: str = result_name("run", on_change="nothing")
    """Name of the run; its folder is <out>/<name>"""
    out: PathText = setting("runs", output="folder", on_change="nothing")
    """Folder that holds all runs."""
    seed: Seed = setting(0, on_change="run")
    """Seed of all random numbers."""
    model: ModelConfig = setting(ModelConfig, on_change="run")
    data: DataConfig = setting(DataConfig)
    augment: AugmentConfig = setting(AugmentConfig)
    train: TrainConfig = setting(TrainConfig)
    objective: dict[str, Any] = setting(dict, on_change="run")
    """Settings of train.loss, if it has any of its own; --help train.loss=NAME lists them."""
    optimizer: OptimizerConfig = setting(OptimizerConfig)
    schedule: RunScheduleConfig = setting(RunScheduleConfig)
    engine: EngineConfig = setting(EngineConfig, on_change="comparison")
    evaluate: EvaluateConfig = setting(EvaluateConfig, on_change="comparison")
    probe: RunProbeConfig = setting(RunProbeConfig, on_change="comparison", needs="every")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, on_change="comparison")
    health: HealthConfig = setting(HealthConfig)
    init: InitConfig = setting(InitConfig, on_change="run")
    track: TrackConfig = setting(TrackConfig, on_change="nothing")

    @property
    def evaluators(self) -> dict[str, RunProbeConfig]:
        """The section of each evaluator beside "scores", those of the held-out split, by its name in
        train/evaluators.py.

        Each has `every`, its interval, and `measured()`: metrics by their name in metrics.jsonl, the most telling
        first.
        """
        return {"probe": self.probe}

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """The ZeRO stages that fit the precision and the optimizer (`_check_engine`), in order."""
        first = (0, 1, 2) if self.engine.precision == "fp32" else (1, 2)
        return first if self.optimizer.name == "muon" else (*first, 3)

    @property
    def commit_minutes(self) -> float:
        """How long the watchdog lets training wait for a checkpoint. In a bucket, its requests may be retried
        meanwhile.
        """
        return self.checkpoint.wait_minutes + self.data.retry_minutes * ("://" in self.checkpoint.folder)

    @property
    def labels(self) -> Labels:
        """What the run does with labels: learn them, learn those that there are, only score classes with them, learn
        numbers in their place, or nothing.
        """
        return OBJECTIVES[self.train.loss].labels

    @property
    def needs_labels(self) -> bool:
        """Whether its data set must have labels."""
        return self.labels not in ("targets", "unread")

    def share_of_run(self, name: str, length: Length) -> Fraction:
        """A length as a share of the run's, at most 1. name: of its setting. Raises UserError if it depends on the size
        of the data set.
        """
        if not length.amount:
            return Fraction(0)
        share = length.share_of(self.train.length, self.train.global_batch)
        if share is None:
            raise UserError(
                f"{name} = {length} cannot be compared with train.length = {self.train.length}: write both in epochs,"
                f" or {name} in %."
            )
        return min(share, Fraction(1))

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError with the arithmetic."""
        check_augment(self.augment, "augment.", "model.image_size", self.model.image_size)
        self._check_model_source()
        # For example, LoRA without a rank would train the head alone, and most losses ignore label smoothing.
        refuse_without_effect(self.train, prefix="train.")
        self._check_training()
        self._check_engine()

    def _check_model_source(self) -> None:
        name, weights, freeze, init = self.model.name, self.init.weights, self.train.freeze, self.init
        if (name is None) == (weights is None):
            raise UserError(
                f"model.name = {quoted(name)} and init.weights = {quoted(weights)}: set one of them."
                " model.name=ViT-B/16, say, is a new model; init.weights continues from weights, which determine their"
                " architecture (model.name=null if the file sets it)."
            )
        if self.train.lora_rank and freeze != "backbone":
            raise UserError(
                f"train.lora_rank = {self.train.lora_rank} needs train.freeze=backbone: LoRA is for weights that are"
                " not trained themselves."
            )
        if name is not None:
            implied(name)  # Raises UserError for an unknown one.
            if freeze != "none":
                raise UserError(
                    f"train.freeze = {freeze} needs init.weights: a new model's values are random. Leave it out."
                )
            if self.train.heads_first.amount:
                raise UserError(
                    f"train.heads_first = {self.train.heads_first} needs init.weights: all of a new model is new. Leave"
                    " it out."
                )
            return
        if init.mean_pool + init.attentive_pool > init.new_head:
            raise UserError(
                "init.mean_pool and init.attentive_pool change what a new head reads: set one of them, with"
                " init.new_head=true."
            )
        if init.fit_head and (not init.new_head or init.attentive_pool or self.data.mix):
            raise UserError(
                "init.fit_head fits a new head to the features of data.path: use init.new_head=true, and leave out"
                " init.attentive_pool and data.mix."
            )
        if init.attentive_pool and freeze == "backbone":
            raise UserError(
                "train.freeze = backbone would leave the new attention pool of init.attentive_pool at its random"
                " values. Use train.freeze=encoder, which trains the pool and the head."
            )
        usual = ModelConfig().options
        changed = [of for of, value in self.model.options.items() if value != usual[of] and of not in ONLY_TRAIN]
        if changed:
            raise UserError(
                f"init.weights determines the architecture: leave out {', '.join(f'model.{of}' for of in changed)}."
            )

    def _check_training(self) -> None:
        batch, streams = self.train.global_batch, self.data.streams
        if batch % streams:
            raise UserError(
                f"train.global_batch = {batch} is not divisible by data.streams = {streams}. "
                f"Use data.streams={math.gcd(batch, streams)}."
            )
        if self.data.targets and self.labels != "targets":
            raise UserError(
                f"data.targets = {quoted(self.data.targets)} needs train.loss=regression; {self.train.loss} learns no"
                " numbers. Leave it out."
            )
        self.schedule.check_decay("schedule.")
        if self.probe.every.amount:
            for _, split in self.probe.tested.values():
                self.probe.check_splits("probe.", split)
            if not self.probe.probes:
                raise UserError(
                    f"probe.every = {self.probe.every} with probe.shots=0, probe.neighbours=0 and"
                    " probe.rankme_images=0: set one of them."
                )

    def _check_engine(self) -> None:
        engine, freeze = self.engine, self.train.freeze
        if engine.zero_stage not in self.zero_stages:
            raise UserError(
                f"engine.zero_stage = {engine.zero_stage} with engine.precision = {engine.precision} and optimizer.name"
                f" = {self.optimizer.name}: use one of {', '.join(map(str, self.zero_stages))}. Stage 0 in 16 bits"
                " takes a wrong first Adam step in DeepSpeed; Muon multiplies whole matrices, of which stage 3 gives"
                " each rank a part."
            )
        if engine.compile and engine.zero_stage == 3 and self.train.lora_rank:
            raise UserError("engine.compile with train.lora_rank needs engine.zero_stage=0, 1 or 2.")
        if engine.offload and (engine.zero_stage == 0 or self.optimizer.name == "muon"):
            raise UserError("engine.offload needs engine.zero_stage=1, 2 or 3, and optimizer.name=adam or sgd.")
        if self.optimizer.name == "muon" and freeze in _FREEZE_ALL_BLOCKS:
            raise UserError(
                f"optimizer.name = muon is for the kernels of hidden layers, none of which train.freeze = {freeze}"
                " trains. Use optimizer.name=adam or sgd."
            )


def check_augment(augment: AugmentConfig, prefix: str, size_name: str, image_size: ImageSize | int) -> None:
    """Raise UserError for an empty range, and sizes that do not fit the image's. prefix, size_name: names in the
    message.
    """
    side = min(ImageSize.parse(image_size))
    for smaller, larger in (("area_min", "area_max"), ("aspect_min", "aspect_max")):
        if getattr(augment, smaller) > getattr(augment, larger):
            raise UserError(
                f"{prefix}{smaller} = {getattr(augment, smaller)} must not be above {prefix}{larger} ="
                f" {getattr(augment, larger)}."
            )
    for name in ("resize_to", "eval_resize"):
        if 0 < getattr(augment, name) < side:
            raise UserError(f"{prefix}{name} = {getattr(augment, name)} is smaller than {size_name} = {image_size}.")
    if augment.padding >= (augment.resize_to or side):
        raise UserError(
            f"{prefix}padding = {augment.padding} is a reflection, so it must be below the side of the image."
        )
