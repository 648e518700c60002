"""The architecture of a model as settings by dotted name, whether it comes from `model.name` or from `init.weights`.

A run that starts from weights does not set `model.name` or `model.width`, so reports show the architecture as built
instead.
"""

from typing import Any

from pipeline import model as models
from pipeline.architecture.variants import HYBRIDS, RESNET_UNITS, VARIANTS
from pipeline.settings.quantities import ImageSize


def as_settings(config: models.Config) -> dict[str, Any]:
    """Returns `model.name`, `model.width`, ... without the fields that do not apply to this model."""
    fields = {**config.to_dict(), "image_size": str(ImageSize(*config.image_size))}
    return {
        "model.name": name_of(config),
        **{f"model.{name}": value for name, value in fields.items() if value is not None},
    }


def name_of(config: models.Config) -> str:
    """The name for `pipeline.model.configure`, or the sizes in its place: "ViT-192x12/8" has width 192 and depth 12.

    What differs from the usual follows: "h6" heads where they are not 64 wide, "m768" an MLP that is not four times as
    wide. So a narrow column of a list tells models apart.
    """
    if isinstance(config, models.ResNetConfig):
        layers = next((layers for layers, units in RESNET_UNITS.items() if units == tuple(config.units)), None)
        if layers is None or config.width % 64:
            return f"BiT-{config.width}x{'-'.join(map(str, config.units))}"
        return f"BiT-R{layers}x{config.width // 64}"
    sizes = (config.width, config.depth, config.mlp_width, config.num_heads)
    letter = next((letter for letter, variant in VARIANTS.items() if variant == sizes), None)
    if config.stem is not None:
        hybrid = (letter, tuple(config.stem), config.patch_size)
        named = next((name for name, found in HYBRIDS.items() if found == hybrid), None)
        return named or f"hybrid-{_sizes(config)}"
    if config.small_stem is not None:
        return f"hybrid-{'-'.join(map(str, config.small_stem))}+{_sizes(config)}/{config.patch_size}"
    kind = "Axial-ViT" if config.axial else "ViT"
    return f"{kind}-{letter or _sizes(config)}/{config.patch_size}"


def _sizes(config: models.ViTConfig) -> str:
    heads = f"h{config.num_heads}" if 64 * config.num_heads != config.width else ""
    mlp = f"m{config.mlp_width}" if config.mlp_width != 4 * config.width else ""
    return f"{config.width}x{config.depth}{heads}{mlp}"
