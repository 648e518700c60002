"""MAE (He et al., arXiv 2111.06377): an encoder sees a quarter of an image's patches, and a small decoder predicts the
rest.

Most patches are removed at random. The backbone runs on the remaining ones only, so its blocks cost about a quarter;
the decoder gets their tokens in the order of the image, with a mask token in each removed place, and predicts the
pixels there. Details as in facebookresearch/mae. What is removed is drawn from (seed, epoch, sample), so it is the same
on any number of ranks and after a restart.

Shapes: B batch, C channels, N patches, K kept patches, D width of the backbone, E width of the decoder, P patch side in
pixels.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted
from pipeline.data.loading.loader import Batch, to_device
from pipeline.data.loading.mix import Mixing
from pipeline.model import Config, DecoderFacts, Model, ViTConfig, Weights, build
from pipeline.model.convert.mae import DECODER, decoder_depth, fold_pixels
from pipeline.model.convert.preprocessing import HALF, IMAGENET_MEAN, IMAGENET_STD
from pipeline.model.layers import Dense, patches_of, run_block, take_tokens
from pipeline.model.position import sincos2d
from pipeline.model.vit import Block, SelfAttention, VisionTransformer
from pipeline.objectives.objective import BACKBONE, Facts, Images, Inputs, Objective
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Settings, setting

_REMOVED = Purpose.named("mae_mask")
_ENCODER_ALONE = "use its encoder alone: launch/export.py format=safetensors"
_PIXELS = {"half": (HALF, HALF), "imagenet": (IMAGENET_MEAN, IMAGENET_STD)}


class MaeSettings(Settings):
    mask_share: float = setting(0.75, above=0, below=1)
    """Share of the patches that are removed and predicted."""
    decoder_width: int = setting(512, min=4, max=2**16)
    """Width of the decoder, a multiple of 4 and of decoder_heads."""
    decoder_depth: int = setting(8, min=1, max=1024)
    """Number of blocks of the decoder."""
    decoder_heads: int = setting(16, min=1, max=2**12)
    """Attention heads of the decoder."""
    normalise: bool = True
    """Predict the pixels of a patch minus their mean, divided by their deviation."""
    pixels: Literal["half", "imagenet"] = "half"
    """Mean and deviation of the images whose pixels are predicted: those that the backbone reads (0.5 for 8-bit RGB),
    or ImageNet's, as in facebookresearch/mae.
    """

    def check(self) -> None:
        """Raise UserError for a width that does not fit the heads or the positions."""
        if self.decoder_width % self.decoder_heads or self.decoder_width % 4:
            raise UserError(
                f"objective.decoder_width = {self.decoder_width} must be divisible by objective.decoder_heads = "
                f"{self.decoder_heads} and by 4, for its sine-cosine positions."
            )


def loss(images: Tensor, predictions: Tensor, removed: Tensor, patch_size: int, normalise: bool) -> Tensor:
    """The mean over the removed patches of a batch of the mean squared difference to their pixels; float32 scalar, 0 if
    none is removed.

    images: (B, C, H, W), those of `Mae.as_predicted`. predictions: (B, N, C P P), the values of a patch in the order
    row, column, channel. removed: bool (B, N). patch_size: P. normalise: predict (pixels - mean) / sqrt(variance +
    1e-6) of each patch.
    """
    return (errors(images, predictions, patch_size, normalise) * removed).sum() / removed.sum().clamp(min=1)


def errors(images: Tensor, predictions: Tensor, patch_size: int, normalise: bool) -> Tensor:
    """Mean squared difference of each patch, float32 (B, N); arguments as of `loss`."""
    targets = patches_of(images.float(), patch_size)
    if normalise:
        variance, mean = torch.var_mean(targets, dim=-1, keepdim=True)
        targets = (targets - mean) / (variance + 1e-6).sqrt()
    return (predictions.float() - targets).square().mean(-1)


class Mae(Objective):
    """A ViT that encodes the kept patches, and a decoder with a mask token, which no other use of the weights needs."""

    Settings = MaeSettings
    continues_additions = True

    @classmethod
    def check_backbone(cls, config: RunConfig, model: Config) -> None:
        num_kept(check_encodes_kept(model, "mae").num_patches, cls.settings(config).mask_share)

    @classmethod
    def check_pixels(cls, config: RunConfig, pixels: Pixels) -> None:
        super().check_pixels(config, pixels)
        if cls.settings(config).pixels == "imagenet" and pixels != RGB8:
            raise UserError(
                "objective.pixels = imagenet is the mean and deviation of 8-bit RGB, and images have"
                f" {pixels.describe()} with a mean and deviation of their own: use objective.pixels=half, as the"
                " backbone reads them."
            )

    def __init__(self, backbone: Model, settings: MaeSettings, seed: int = 0) -> None:
        """Raises UserError for a backbone that cannot encode a part of its patches, as one of init.weights may be."""
        super().__init__(backbone)
        self.given, self.seed = settings, seed
        self.normalise = settings.normalise
        self.mean, self.std = _PIXELS[settings.pixels]
        vit = check_encodes_kept(backbone.config, "mae")
        self.num_patches = vit.num_patches
        self.num_kept = num_kept(self.num_patches, settings.mask_share)
        E = settings.decoder_width
        # The paper's blocks, whatever parts of later ViTs the backbone has.
        decoder = ViTConfig(
            E,
            settings.decoder_depth,
            4 * E,
            settings.decoder_heads,
            vit.patch_size,
            vit.image_size,
            0,
            positions="sincos2d_mae",
            gelu=vit.gelu,
            layer_norm_eps=vit.layer_norm_eps,
            pool="token" if vit.has_class_token else "gap",
        )
        self.decoder_embed = Dense(vit.width, E)
        self.mask_token = nn.Parameter(torch.empty(1, 1, E))
        self.decoder_positions = nn.Buffer(sincos2d(decoder))  # saved, since weights may bring other ones
        self.decoder_blocks = nn.ModuleList(
            Block(decoder, SelfAttention(decoder, decoder.num_tokens), 0.0) for _ in range(decoder.depth)
        )
        self.decoder_norm = nn.LayerNorm(E, eps=vit.layer_norm_eps)
        self.decoder_pred = Dense(E, vit.pixels.num_channels * vit.patch_size**2)
        nn.init.normal_(self.mask_token, std=0.02)
        for name, part in self.named_modules():
            if isinstance(part, Dense) and name.startswith("decoder_"):
                nn.init.xavier_uniform_(part.weight)

    def extra(self) -> dict[str, Any]:
        return {DECODER: asdict(self.facts)}

    @property
    def facts(self) -> DecoderFacts:
        """What the decoder's tensors do not tell."""
        return DecoderFacts(self.given.decoder_heads, self.normalise, self.mean, self.std)

    @classmethod
    def from_weights(cls, weights: Weights, say: Callable[[str], object], **known: Any) -> Self | None:
        """The model and decoder in weights, in evaluation mode; None if they hold no decoder.

        say: called with a line for what is assumed of the decoder. known: fields of `DecoderFacts` that are not taken
        from the weights.
        """
        additions, usual = weights.added, MaeSettings()
        if "decoder_embed.weight" not in additions:
            return None
        facts = replace(weights.decoder, **{name: value for name, value in known.items() if value is not None})
        if None in (facts.num_heads, facts.normalise):
            say(
                "taken as in facebookresearch/mae where the weights do not tell: a decoder of"
                f" {counted(usual.decoder_heads, 'head')}, which predicts normalised pixels"
            )
        told = _told(additions, facts)
        settings = MaeSettings(**{name: value for name, value in told.items() if value is not None})
        settings.check()
        found = cls(build(weights.config), settings)
        found.mean, found.std = facts.mean, facts.std
        found.backbone.load_state_dict(weights.state)
        found.load_additions(additions, facts)
        return found.eval()

    def load_additions(self, additions: Mapping[str, Tensor], facts: DecoderFacts) -> str:
        """Copy the decoder of MAE's weights. Raises UserError if its size, or what it predicts, is not that of the
        settings.
        """
        if "decoder_embed.weight" not in additions:
            return "init.weights: holds no decoder of MAE, so the decoder starts new"
        own = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(BACKBONE)}
        # All that differs in one message: with one at a time a run was started anew for each setting.
        told = _told(additions, facts)
        if wrong := [name for name, value in told.items() if value not in (None, getattr(self.given, name))]:
            given = " ".join(f"objective.{name}={str(told[name]).lower()}" for name in wrong)
            raise UserError(f"init.weights: its decoder does not fit the settings. Set {given}.")
        if (facts.mean, facts.std) != (self.mean, self.std):
            if self.normalise:
                raise UserError(
                    f"init.weights: its decoder predicts normalised pixels of images with mean {facts.mean} and"
                    f" deviation {facts.std}. Set objective.pixels to these ({' or '.join(_PIXELS)}), or"
                    f" {_ENCODER_ALONE}."
                )
            additions = fold_pixels(additions, replace(facts, normalise=False), self.mean, self.std)
        shapes, read = ({name: tuple(t.shape) for name, t in state.items()} for state in (own, additions))
        if odd := [name for name in sorted(shapes | read) if shapes.get(name) != read.get(name)]:
            raise UserError(
                f"init.weights: {odd[0]} of its decoder is {read.get(odd[0])}, and {shapes.get(odd[0])} here. Set"
                f" model.image_size to that of the weights, or {_ENCODER_ALONE}."
            )
        self.load_state_dict(additions, strict=False)
        return "init.weights: continued with its decoder"

    # ------------------------------------------------------------------ from a batch to the loss
    def draw(self, batch: Batch, training: bool) -> dict[str, Tensor]:
        """`kept`, int64 (B, K): the kept patches in the order of the image. `places`, int64 (B, N): the number of each
        patch among the kept ones, or K for a removed one.
        """
        kept, places = draw_masks(self.seed, batch.epochs, batch.rows, self.num_patches, self.num_kept)
        return {"kept": kept, "places": places}

    def inputs(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> Inputs:
        """Adds to the default: `images`, the pixels in float32."""
        views, facts = super().inputs(batch, device, mixing)
        return Inputs(views, facts | {"images": self.as_predicted(views[0])})

    def as_predicted(self, images: Tensor) -> Tensor:
        """(B, C, H, W) as the backbone reads them -> the same images with the mean and deviation of the pixels that are
        predicted.
        """
        if (self.mean, self.std) == (HALF, HALF):
            return images
        mean, std = (to_device(torch.tensor(v), images.device).view(1, 3, 1, 1) for v in (self.mean, self.std))
        return (images * 0.5 + 0.5 - mean) / std

    def predict(self, images: Tensor, kept: Tensor, places: Tensor) -> Tensor:
        """(B, C, H, W), `kept` and `places` as `draw` gives them -> the pixels of all patches, (B, N, C P P)."""
        vit = cast(VisionTransformer, self.backbone)
        return self.decode(vit.encode(vit.embed(images, kept=kept), kept=kept), places)

    def decode(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Tokens of class token, registers and kept patches -> predictions (B, N, C P P). Registers are left out."""
        x = self.decoder_embed(tokens)
        K, first = self.num_kept, self.decoder_positions.shape[1] - self.num_patches
        choices = torch.cat([x[:, -K:], self.mask_token.expand(x.shape[0], -1, -1)], dim=1)
        x = torch.cat([x[:, :first], take_tokens(choices, places)], dim=1) + self.decoder_positions.to(x.dtype)
        for block in self.decoder_blocks:
            x = run_block(block, x, bool(self.backbone.activation_checkpointing))
        return self.decoder_pred(self.decoder_norm(x)[:, first:])

    def losses(self, views: Images, facts: Facts) -> Tensor:
        """As many patches are removed of each image, so the batch's loss is the mean of those of its images."""
        predictions = self.predict(views[0], facts["kept"], facts["places"])
        found = errors(facts["images"], predictions, cast(ViTConfig, self.backbone.config).patch_size, self.normalise)
        return (found * (facts["places"] == self.num_kept)).sum(1) / (self.num_patches - self.num_kept)


def _told(additions: Mapping[str, Tensor], facts: DecoderFacts) -> dict[str, Any]:
    """Settings of the decoder that weights hold; None for what they do not tell."""
    return {
        "decoder_width": len(additions["decoder_embed.weight"]),
        "decoder_depth": decoder_depth(additions),
        "decoder_heads": facts.num_heads,
        "normalise": facts.normalise,
    }


def check_encodes_kept(vit: Config, loss: str) -> ViTConfig:
    """Returns the backbone's configuration. Raises UserError if it cannot encode a part of its patches (`encode` of
    vit.py), or has parameters that then get no gradient. loss: value of train.loss.
    """
    found = ["no tokens"]
    if isinstance(vit, ViTConfig):
        if not vit.has_stem:
            vit.check_covered()
        fits = {
            "stem": None,
            "small_stem": None,
            "axial": False,
            "positions_at": "stem",
            "representation": False,
            "pool_norm": False,
        }
        odd = [name for name, value in fits.items() if getattr(vit, name) != value]
        odd += ["positions"] * (vit.positions == "relative") + ["pool"] * vit.pools_by_attention
        if not odd:
            return vit
        found = [f"{name} = {getattr(vit, name)}" for name in odd]
    raise UserError(
        f"train.loss = {loss} trains a plain ViT, such as ViT-B/16, with a class token or mean pooling, with positions "
        f"at the stem and without representation layer; this backbone has {', '.join(found)}."
    )


def num_kept(num_patches: int, mask_share: float) -> int:
    """Number of patches that MAE keeps. Raises UserError if it is 0."""
    kept = int(num_patches * (1 - mask_share))
    if kept < 1:
        raise UserError(
            f"objective.mask_share = {mask_share} keeps none of {counted(num_patches, 'patch')}. Use smaller patches or"
            " a smaller share."
        )
    return kept


def draw_masks(
    seed: int, epochs: np.ndarray, rows: np.ndarray, num_patches: int, num_kept: int
) -> tuple[Tensor, Tensor]:
    """(`kept`, `places`) of `Mae.draw` for samples by their epochs and rows, int64 (B,)."""
    sample = (epochs[:, None], rows[:, None], np.arange(num_patches))
    order = np.argsort(random_numbers.bits(seed, _REMOVED, *sample), axis=1, kind="stable")
    return as_places(np.sort(order[:, :num_kept], axis=1), num_patches)


def as_places(kept: np.ndarray, num_patches: int) -> tuple[Tensor, Tensor]:
    """(`kept`, `places`) of `Mae.draw` from the kept patches, int64 (B, K)."""
    places = np.full((len(kept), num_patches), kept.shape[1], np.int64)
    np.put_along_axis(places, kept, np.broadcast_to(np.arange(kept.shape[1]), kept.shape), axis=1)
    return torch.from_numpy(kept), torch.from_numpy(places)
