"""The architecture of a model as settings by dotted name, whether it comes from `model.name` or from `init.weights`.

A run that starts from weights does not set `model.name` or `model.width`, so reports show the architecture as built instead.
"""

from pathlib import Path
from typing import Any

from pipeline import json_record
from pipeline import model as models
from pipeline.checkpoint.store import Checkpoints, read_state
from pipeline.errors import UserError
from pipeline.model.variants import HYBRIDS, RESNET_UNITS, VARIANTS
from pipeline.settings.quantities import ImageSize

FILE = "model.json"


def as_settings(config: models.Config) -> dict[str, Any]:
    """Returns `model.name`, `model.width`, ... without the fields that do not apply to this model."""
    fields = {**config.to_dict(), "image_size": str(ImageSize(*config.image_size))}
    return {
        "model.name": name_of(config),
        **{f"model.{name}": value for name, value in fields.items() if value is not None},
    }


def name_of(config: models.Config) -> str:
    """The name for `pipeline.model.configure`, or a description if it has none, such as "ViT/8, width 32, depth 2"."""
    if isinstance(config, models.ResNetConfig):
        layers = next((layers for layers, units in RESNET_UNITS.items() if units == tuple(config.units)), None)
        if layers is None or config.width % 64:
            return f"BiT, width {config.width}, units {'-'.join(map(str, config.units))}"
        return f"BiT-R{layers}x{config.width // 64}"
    sizes = (config.width, config.depth, config.mlp_width, config.num_heads)
    letter = next((letter for letter, variant in VARIANTS.items() if variant == sizes), None)
    if config.stem is not None:
        hybrid = (letter, tuple(config.stem), config.patch_size)
        named = next((name for name, found in HYBRIDS.items() if found == hybrid), None)
        return named or f"hybrid, width {config.width}, depth {config.depth}"
    kind = "Axial-ViT" if config.axial else "ViT"
    if letter is None:
        return f"{kind}/{config.patch_size}, width {config.width}, depth {config.depth}"
    return f"{kind}-{letter}/{config.patch_size}"


def of_run(folder: Path) -> dict[str, Any] | None:
    """The architecture of a run, from its folder or (runs of earlier versions) its newest checkpoint; None if neither has it.

    Raises UserError for a damaged file.
    """
    try:
        content = json_record.read(folder / FILE, dict[str, Any])
        where = str(folder / FILE)
    except FileNotFoundError:
        found = Checkpoints(folder / "checkpoints").candidates()
        if not found:
            return None
        where = f"{found[0]}/state.json"
        content = read_state(found[0]).model
    try:
        return as_settings(models.config_from_dict(content))
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{where} is damaged ({error}). Remove it if the run has a checkpoint.") from None
