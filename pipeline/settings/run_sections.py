"""The sections of a run's settings that say what is trained: model, data, augmentation, length, optimizer, schedule.
`run.py` has them all.
"""

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pipeline.architecture.config import ONLY_TRAIN, Gelu, Pool, Positions, QkvBias
from pipeline.architecture.objectives import OBJECTIVES
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.settings.quantities import (
    MAX_BATCH,
    MAX_THREADS,
    Batch,
    ImageSize,
    Length,
    Limit,
    PathText,
    Share,
    ShareBelow1,
    Side,
    Threads,
)
from pipeline.settings.schema import REQUIRED, Settings, setting
from pipeline.settings.shared import minutes

if TYPE_CHECKING:
    from pipeline.architecture.pixels import Pixels

Precision = Literal["fp32", "bf16"]
# What settings need of training crops that choose a box of the image, and of those that resize it first.
_BOX, _RESIZE = "crop=inception,random_resized", "crop=resize_crop,resize_small_crop"
# Augmentations that are defined for 8-bit RGB only.
_OF_COLOURS = ("color_jitter", "saturation", "hue", "three_augment", "grey", "solarise", "randaugment_layers")


def _named(text: str) -> list[str]:
    """The names in a text with commas between them, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


class ModelConfig(Settings):
    """The model: its name, its image size, and what a run may set of `ViTConfig`; of a ResNet the width and head_bias,
    which a ViT has too.
    """

    name: str | None = setting(
        None,
        "Architecture: a size (Ti, S, M, B, L, So400m, H, g, G, e) and a patch side, as ViT-L/16; or Axial-ViT-B/16,"
        " R50+ViT-B/16, BiT-R50x1. Leave it out with init.weights.",
    )
    image_size: ImageSize = setting(ImageSize(224, 224), "Input size in pixels: side of a square, or height x width.")
    width: int | None = setting(
        None, "Overrides the variant's width D; for a ResNet, the channels of its first layer.", min=1, max=2**16
    )
    depth: int | None = setting(None, "Overrides the variant's number of blocks.", min=1, max=1024)
    mlp_width: int | None = setting(None, "Overrides the variant's MLP width.", min=1, max=2**18)
    num_heads: int | None = setting(None, "Overrides the variant's number of heads.", min=1, max=2**12)
    positions: Positions = setting(
        "learned",
        "Position embedding: learned 1-D or 2-D, fixed sine-cosine (with MAE's frequencies: sincos2d_mae), relative"
        " attention, or none.",
    )
    positions_at: Literal["stem", "blocks", "shared"] = setting(
        "stem",
        "Where positions are added: once (stem), before every block with a table for each (blocks), or before every"
        " block with the same table (shared).",
    )
    pool: Pool | None = setting(
        None,
        "Input of the head: class token; global average pool or attention pool (map) of a model without class token;"
        " or, beside a class token, the mean of the patches (mean), token and mean (both), or an attention pool"
        " (attentive). null is token (axial models: gap).",
    )
    representation: bool = setting(
        True,
        "Add a dense + tanh layer before the head (pre-training only); mae, dino and lejepa train none, whatever is"
        " set.",
    )
    gelu: Gelu = setting(
        "tanh", "GELU: tanh approximation (official code), exact (erf), or x sigmoid(1.702 x) (quick, CLIP)."
    )
    dropout: ShareBelow1 = setting(
        0.0, "Dropout after positions, attention output and MLP layers (0.1 on ImageNet-21k)."
    )
    drop_path: ShareBelow1 = setting(0.0, "Stochastic depth: drop probability of the last block, linear from 0.")
    head_bias: float = setting(
        0.0, "Initial bias of the head; -10 suits sigmoid loss on 21k classes.", min=-1000, max=1000
    )
    registers: int = setting(
        0, "Extra learned tokens without a position, which the head does not read; 4 in DINOv2.", min=0, max=256
    )
    layer_scale: float | None = setting(
        None,
        "Initial value of LayerScale, learned factors of each residual branch; 1e-5 in DINOv2; null: no factors.",
        min=-1000,
        max=1000,
    )
    swiglu: bool = setting(
        False, "Gated MLP: silu(gate) times value, each mlp_width wide (DINOv2's g, DINOv3's H+ and 7B)."
    )
    rope_base: float | None = setting(
        None,
        "Base period of rotary positions of queries and keys (RoPE), for any image size; 100 in DINOv3; null: no"
        " rotation.",
        max=1e9,
        above=1,
    )
    rope_side: int | None = setting(
        None,
        "RoPE's coordinates are the numbers of row and column, from 0, stretched to grids of this many patches a side;"
        " 0: not stretched; null: from -1 to 1.",
        min=0,
        max=2**17,
    )
    rope_shift: float = setting(
        0.0,
        "RoPE in training: the coordinates, from -1 to 1, are shifted by up to this, anew in each step.",
        min=0,
        max=100,
    )
    rope_jitter: float = setting(
        1.0,
        "RoPE in training: rows and columns are stretched by factors of up to this, or 1 over it; 1: not at all.",
        min=1,
        max=100,
    )
    rope_rescale: float = setting(
        1.0,
        "RoPE in training: both are stretched by a common factor of up to this, or 1 over it; 2 in DINOv3.",
        min=1,
        max=100,
    )
    qkv_bias: QkvBias = setting("qkv", "Which of queries, keys and values have a bias; qv in DINOv3.")
    out_bias: bool = setting(True, "Bias of the attention's output layer.")
    mlp_bias: bool = setting(True, "Biases of the MLP's layers.")
    embedding_norm: bool = setting(False, "LayerNorm of all tokens before the first block, as in CLIP.")
    qk_norm: bool = setting(False, "LayerNorm of each head's queries and keys (ViT-22B).")
    pool_norm: bool = setting(
        False,
        "The final LayerNorm is of the mean of the patches, not of the tokens (pool=mean or gap), as MAE fine-tunes.",
    )
    class_norm: bool = setting(False, "A final LayerNorm of its own for class token and registers, as in DINOv3 7B.")
    small_stem: list[int] | None = setting(
        None,
        "Hybrid for small images, as [32,64,128]: a 3 x 3 convolution, then a residual unit of two for each number of"
        " channels; where these grow, the map is halved. The patch side of model.name counts its cells (ViT-Ti/1).",
    )

    @property
    def options(self) -> dict[str, Any]:
        """What these settings say of a model beside its name and image size: arguments of `configure`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "image_size")}

    def for_weights(self) -> dict[str, Any]:
        """The settings that a run may change for init.weights, except for the image size: they act in training only."""
        return {name: getattr(self, name) for name in ONLY_TRAIN}


class MixedSet(Settings):
    """A data set of a mixture, or another weight of one from a step on."""

    path: PathText = setting(REQUIRED, "Folder or URL of a data set beside data.path")
    weight: NonNegativeFloat = setting(
        REQUIRED, "Its samples in a batch are in this proportion to those of data.path, data.weight"
    )
    split: str = setting("train", "Split to train on.")
    exclude: str = setting("all", "Lists of excluded samples: all, none, or names with commas.")
    limit: Limit = setting(Limit.parse("100%"), "Train on a random subset: a number of samples or a share.")
    class_map: dict[str, str] = setting(
        dict, "Classes of this set that have another name in the mixture, as {kitty: cat}."
    )
    labels: bool = setting(
        True,
        "Whether its labels are read. With train.loss=pseudo_labels, false makes its images unlabelled; data.path may"
        " then be named again.",
    )
    from_step: int = setting(
        0,
        "Step from which the set has this weight. An entry with the path, split and labels of an earlier one changes"
        " its weight.",
        min=0,
        max=10**12,
    )
    eval_split: str = setting(
        "",
        "Splits of this set to evaluate on beside data.eval_split, with commas between; their metrics begin with the"
        " folder's name.",
    )

    @property
    def evaluated(self) -> dict[str, str]:
        """Beginning of the names of metrics -> split of this set to evaluate on."""
        # Options of a URL may have slashes, too.
        path = self.path.partition("?")[0] if "://" in self.path else self.path
        folder = re.sub(r"[^\w.-]", "_", path.rstrip("/").rpartition("/")[2])
        return {f"{folder}_{name}": name for name in _named(self.eval_split)}

    @property
    def name(self) -> tuple[str, str, bool]:
        """What identifies a set: path, split, and whether its labels are read."""
        return self.path.rstrip("/"), self.split, self.labels


class DataConfig(Settings):
    path: PathText = setting(
        REQUIRED,
        "Folder or URL (s3://, gs://) of a data set, made by launch/shard.py",
        on_change="comparison",
    )
    cache: PathText = setting(
        "",
        "Folder on a local disk that caches shards of a bucket, shared by the ranks of a node; empty: no cache.",
        output="folder",
        on_change="nothing",
    )
    cache_gb: PositiveFloat = setting(
        200.0,
        "Maximum size of data.cache in GB; least recently read shards are removed.",
        on_change="nothing",
        needs="cache",
    )
    retry_minutes: float = minutes(
        10.0,
        "Minutes for which a failed bucket request is retried before the run stops; the watchdog allows such a wait.",
    )
    train_split: str = setting("train", "Split to train on.", on_change="run")
    eval_split: str = setting(
        "val", "Split to evaluate on; empty: none. Without labels, val is none if there is no such split."
    )
    eval_also: str = setting(
        "",
        "Further splits of data.path to evaluate on, with commas between; their metrics begin with the split's name.",
        on_change="comparison",
    )
    exclude: str = setting("all", "Lists of excluded samples (exclude/*.parquet): all, none, or names with commas.")
    limit: Limit = setting(
        Limit.parse("100%"),
        "Train on a random subset: a number of samples or a share. Larger subsets contain the smaller ones.",
        on_change="run",
    )
    dev_share: ShareBelow1 = setting(
        0.0,
        "Share of the training samples held out at random as split 'dev', which is then evaluated instead of "
        "data.eval_split, to choose settings by; of samples with groups, whole groups. 0: none.",
    )
    weight: PositiveFloat = setting(
        1.0,
        "In a mixture: the samples of data.path in a batch are in this proportion to those of each set of data.mix.",
        on_change="comparison",
        needs="mix",
    )
    mix: list[MixedSet] = setting(
        list,
        "Data sets that are trained on beside data.path, as [{path: datasets/b, weight: 0.5}] (docs/mixtures.md).",
        on_change="comparison",
    )
    streams: int = setting(
        16,
        "Number of equal streams that an epoch is divided into; must divide train.global_batch. More mix better.",
        min=1,
        max=1_000_000,
        on_change="run",
    )
    window: PositiveInt = setting(
        4096, "Number of consecutive samples of a stream that are shuffled together.", on_change="run"
    )
    balance: Share = setting(
        1.0,
        "Draw classes with probability proportional to their number of samples to this power: 1 takes each sample once"
        " an epoch, 0 all classes equally often, 0.5 is between. A sample's class is its first label.",
        on_change="run",
    )
    threads: Threads = setting(2, "Decoding threads of each rank.", on_change="nothing")
    processes: int = setting(
        0,
        "Decode training images in so many processes of each rank instead of data.threads threads; of local files only."
        " For small images, whose decoding mostly holds Python's lock (docs/performance.md); the batches are the same.",
        min=0,
        max=MAX_THREADS,
        on_change="nothing",
    )
    prefetch: int = setting(4, "Number of micro-batches decoded ahead.", min=1, max=10_000, on_change="nothing")
    max_bad_share: Share = setting(
        0.001,
        "Share of unreadable images, of those trained on or of those scored, above which the run stops.",
        on_change="comparison",
    )

    @property
    def evaluated(self) -> list[str]:
        """Beginnings of the names of metrics of the splits that the run is evaluated on: of data.path, then of each
        other set.

        The first is the main one: of its predictions are figures and scores.json.
        """
        own = [] if not self.evaluated_split else [self.evaluated_split]
        return [*own, *self.also_evaluated, *(name for entry in self.mix for name in entry.evaluated)]

    @property
    def evaluated_split(self) -> str:
        """The split that is evaluated of data.path, "" for none; those of data.eval_also are others."""
        return "dev" if self.dev_share else self.eval_split

    @property
    def also_evaluated(self) -> list[str]:
        """Splits of data.eval_also."""
        return _named(self.eval_also)


class AugmentConfig(Settings):
    """Augmentation and preprocessing. The default of a new field must leave images as they are without it."""

    crop: Literal["inception", "random_resized", "resize_crop", "resize_small_crop", "none"] = setting(
        "inception",
        "Training crop: random area and aspect ratio, as TensorFlow (inception) or torchvision's RandomResizedCrop,"
        " with a log-uniform aspect (random_resized); random crop after resizing the whole image (resize_crop) or its"
        " short side (resize_small_crop) to augment.resize_to; or only a resize (none).",
    )
    area_min: float = setting(0.05, "inception, random_resized: smallest part of the area.", above=0, max=1, needs=_BOX)
    area_max: float = setting(1.0, "inception, random_resized: largest part of the area.", above=0, max=1, needs=_BOX)
    aspect_min: PositiveFloat = setting(3 / 4, "inception, random_resized: smallest width / height.", needs=_BOX)
    aspect_max: PositiveFloat = setting(4 / 3, "inception, random_resized: largest width / height.", needs=_BOX)
    resize_to: Side = setting(
        0, "resize_crop, resize_small_crop: size before the crop; 0 is 7/6 of image_size (448 for 384).", needs=_RESIZE
    )
    padding: Side = setting(
        0,
        "resize_crop, resize_small_crop: pixels of its own reflection that are put around the image before the crop; 4"
        " in DeiT III's simple crop and for CIFAR-10, with resize_to=model.image_size.",
        needs=_RESIZE,
    )
    flip: bool = setting(True, "Flip horizontally with probability 0.5.")
    flip_vertical: bool = setting(False, "Flip vertically with probability 0.5, for images without an up and down.")
    turns: bool = setting(False, "Turn by 0, 90, 180 or 270 degrees, each with probability 0.25; square views only.")
    resize_filter: Literal["linear", "antialias", "bilinear", "bicubic"] = setting(
        "linear",
        "linear: bilinear without antialias in training, as the papers' code (in resize_small_crop area), and area in"
        " evaluation; antialias: Pillow's bilinear; bilinear: bilinear without antialias in both; bicubic: Pillow's"
        " bicubic, with antialias.",
        ignores_section=True,
    )
    color_jitter: Share = setting(
        0.0, "Multiply brightness, contrast and saturation by random factors from 1 - color_jitter to 1 + color_jitter."
    )
    saturation: Share = setting(0.0, "Colour jitter: another strength for saturation (0.2 in DINO); 0 is color_jitter.")
    hue: float = setting(
        0.0, "Colour jitter: turn hues by a random share of the circle, at most this (0.1 in DINO).", min=0, max=0.5
    )
    color_jitter_probability: Share = setting(
        1.0, "Probability of colour jitter (0.8 in DINO).", needs="color_jitter|saturation|hue"
    )
    channel_brightness: Share = setting(
        0.0,
        "Multiply the values of each channel, above its low end, by a random factor of its own, from 1 -"
        " channel_brightness to 1 + channel_brightness.",
    )
    channel_contrast: Share = setting(
        0.0, "The same for their distances from the channel's mean in the view, by factors from 1 - channel_contrast."
    )
    three_augment: Share = setting(
        0.0,
        "Probability of 3-Augment (1 in DeiT III): makes an image grey, or solarises it, or blurs it, each with a third"
        " of it, before the colour jitter.",
    )
    grey: Share = setting(0.0, "Probability of making a view grey.")
    blur: Share = setting(0.0, "Probability of a Gaussian blur with a standard deviation from 0.1 to 2 pixels.")
    solarise: Share = setting(0.0, "Probability of inverting values of 128 and above.")
    randaugment_layers: int = setting(
        0, "RandAugment's N: random operations per image (2 in the recipes).", min=0, max=100
    )
    randaugment_magnitude: float = setting(
        10.0, "RandAugment's M: strength of the operations.", min=0, max=20, needs="randaugment_layers"
    )
    randaugment_contrast: Literal["mean", "pixel_count"] = setting(
        "mean",
        "Grey value that RandAugment's Contrast blends with: the image's mean, or height x width / 256 (196 at 224 px),"
        " as in the published AugReg and big_vision runs.",
        needs="randaugment_layers",
    )
    noise: Share = setting(
        0.0,
        "Add normal noise to each value, with a standard deviation that is drawn for each view, from 0 to this share of"
        " the channel's range.",
    )
    erase: Share = setting(0.0, "Random erasing: probability of replacing 2 to 33 % of the image by noise.")
    drop_channels: Share = setting(
        0.0, "Probability with which each channel is replaced by its low end, black; one is always left."
    )
    mixup: Share = setting(0.0, "Mixup of image pairs and labels, with a weight from Beta(mixup, mixup) per step.")
    cutmix: Share = setting(
        0.0,
        "CutMix: swap a box between pairs, its area from Beta(cutmix, cutmix); if mixup is set too, each step uses one"
        " of the two.",
    )
    eval_resize: Side = setting(
        0,
        "Evaluation: size before the central crop; 0 is 8/7 of model.image_size (256 for 224).",
        ignores_section=True,
        needs="eval_crop=center,resize_center",
    )
    eval_crop: Literal["center", "resize", "resize_center"] = setting(
        "center",
        "Evaluation: resize the short side to eval_resize and crop the centre (center); resize the whole image"
        " (resize); or resize the whole image to eval_resize and crop the centre (resize_center, big_vision's"
        " few-shot).",
        ignores_section=True,
    )

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


def _objective(name: str) -> str:
    if name not in OBJECTIVES:
        raise ValueError(f"must be one of {', '.join(OBJECTIVES)}")
    return name


class TrainConfig(Settings):
    length: Length = setting(REQUIRED, "Length of the run, for example '90 epochs'", above=0, on_change="comparison")
    global_batch: Batch = setting(4096, "Samples per optimizer step, over all ranks.", on_change="run")
    micro_batch: Batch = setting(
        64, "Samples per forward pass of one rank; determines accumulation.", on_change="comparison"
    )
    loss: Annotated[str, AfterValidator(_objective)] = setting(
        "sigmoid",
        "Cross-entropy of class labels, over softmax or summed over sigmoids; or without labels: self-distillation"
        " (dino), prediction between views with normal projections (lejepa), a masked autoencoder (mae), prediction of"
        " the features (distill) or the classes (distill_classes) of published weights, or masked patch prediction of"
        " the mean colour of half of the patches (512 colours), of 4 x 4 such colours, or of the pixels; or of few"
        " labels and of what an average of the weights is sure of in images without one (pseudo_labels).",
        choices=OBJECTIVES,
        on_change="run",
    )
    freeze: str = setting(
        "none",
        "With init.weights, what is not trained: nothing (none), all but the head (backbone), all but the head and the"
        " attention pool that it reads (encoder), or what comes before the first block and so many first blocks (8"
        " blocks).",
        pattern=r"^(none|backbone|encoder|[1-9]\d{0,3} blocks?)$",
        on_change="run",
    )
    lora_rank: int = setting(
        0,
        "With train.freeze=backbone: rank of the trained changes of train.lora_layers (LoRA), which are added to the"
        " weights that are scored and exported. 0 turns LoRA off.",
        min=0,
        max=65_536,
        on_change="run",
    )
    lora_alpha: PositiveFloat = setting(
        16.0,
        "LoRA: the changes are multiplied by lora_alpha / lora_rank.",
        needs="lora_rank",
        on_change="run",  # A checkpoint holds the factor.
    )
    lora_layers: list[str] = setting(
        ["qkv", "out"],
        "LoRA: dense layers of each block: qkv, out, up, down.",
        min_items=1,
        needs="lora_rank",
        on_change="run",
    )
    label_smoothing: Share = setting(
        0.0, "Softmax: share of the target spread over all classes.", needs="loss=softmax,pseudo_labels"
    )
    log_every: PositiveInt = setting(50, "Steps between log lines.", on_change="nothing")
    max_skipped_steps: NonNegativeInt = setting(
        20,
        "Steps skipped for non-finite gradients, or by health.on_spike=skip, above which the run stops.",
        on_change="comparison",
    )
    stop_after_minutes: float = minutes(
        0.0,
        "Wall-clock limit of each start, including the final checkpoint: the run exits in time with code 75. 0: none.",
    )


class OptimizerConfig(Settings):
    name: Literal["adam", "sgd", "muon"] = setting(
        "adam",
        "Adam with decoupled weight decay, SGD with momentum, or Muon for the kernels of hidden layers with Adam for"
        " the rest.",
        on_change="run",
    )
    lr: PositiveFloat = setting(1e-3, "Peak learning rate.")
    lr_batch: int = setting(
        0,
        "Batch size that lr is meant for: lr is multiplied by train.global_batch / lr_batch. 0 uses lr as it is.",
        min=0,
        max=MAX_BATCH,
    )
    beta1: ShareBelow1 = setting(0.9, "Adam: decay of the first moment.", needs="name=adam,muon")
    beta2: ShareBelow1 = setting(0.999, "Adam: decay of the second moment.", needs="name=adam,muon")
    eps: PositiveFloat = setting(1e-8, "Adam: term added to the denominator.", needs="name=adam,muon")
    momentum: ShareBelow1 = setting(0.9, "SGD: momentum.", needs="name=sgd")
    muon_momentum: ShareBelow1 = setting(0.95, "Muon: Nesterov momentum of the matrices.", needs="name=muon")
    weight_decay: NonNegativeFloat = setting(
        0.1,
        "Weight decay of dense kernels, multiplied by the learning rate; Adam, Muon: decoupled, SGD: added to the"
        " gradient.",
    )
    weight_decay_end: NonNegativeFloat | None = setting(
        None,
        "Weight decay at the end of the run, which it approaches along half a cosine. null keeps it constant.",
    )
    layer_decay: float = setting(
        1.0,
        "Factor by which each block learns more slowly than the next one, such as 0.75 for fine-tuning; what comes"
        " before the first block is the slowest.",
        above=0,
        max=1,
    )
    clip: NonNegativeFloat = setting(1.0, "Clip gradients to this global norm; 0 turns clipping off.")
    ema_decay: ShareBelow1 = setting(
        0.0,
        "Decay of an exponential moving average of the weights (Polyak averaging), such as 0.9999; the average is then "
        "evaluated and exported. 0 turns it off.",
    )


class ScheduleConfig(Settings):
    decay: Literal["linear", "cosine", "constant", "drops"] = setting(
        "linear", "Learning rate after warm-up; drops divides it by 10 at each of schedule.drops."
    )
    drops: list[Annotated[float, Field(gt=0, lt=1)]] = setting(
        list, "With decay=drops: points of the run as shares of its length, as [0.3, 0.6, 0.9]."
    )
    warmup: Length = setting(Length.parse("10000 steps"), "Linear warm-up from 0.")
    final: Share = setting(
        0.0,
        "Learning rate at the end, as a share of the peak; none with decay=constant without a cooldown.",
        needs="decay=linear,cosine,drops|cooldown",
    )

    def check_decay(self, prefix: str) -> None:
        """Raise UserError unless drops are set if and only if decay=drops. prefix: of the settings' names."""
        if (self.decay == "drops") != bool(self.drops):
            raise UserError(
                f"{prefix}decay = {self.decay} with {prefix}drops = {quoted(self.drops)}: decay=drops needs shares of"
                f" the run, as {prefix}drops=[0.3,0.6,0.9], and other decays take none."
            )


class RunScheduleConfig(ScheduleConfig):
    cooldown: Length = setting(
        Length.parse("0 steps"),
        "With decay=constant: last part of the run, in which the rate falls linearly to schedule.final; 0: none."
        " Until it begins, runs of any length are the same, so launch/study.py trains them once.",
    )

    def check_decay(self, prefix: str) -> None:
        """Check as above, and refuse a cooldown of a rate that falls anyway. Raises UserError."""
        super().check_decay(prefix)
        if self.cooldown.amount and self.decay != "constant":
            raise UserError(f"{prefix}cooldown = {self.cooldown} needs {prefix}decay=constant, and it is {self.decay}.")
