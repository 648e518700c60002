"""The architecture of a model as settings by dotted name, wherever it came from: `model.name`, or the weights of `init.weights`.

The `model.*` settings of a run that starts from weights say little (no name, no width); what is shown and compared is this.
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
    """`model.name`, `model.width`, ...: what the model has; fields that mean nothing for it are left out."""
    fields = {**config.to_dict(), "image_size": str(ImageSize(*config.image_size))}
    return {
        "model.name": name_of(config),
        **{f"model.{name}": value for name, value in fields.items() if value is not None},
    }


def name_of(config: models.Config) -> str:
    """The name that `models.configure` takes, or a description of a model that has none: "ViT/8, width 32, depth 2"."""
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
    """The architecture of a run from its folder, or from its newest checkpoint (runs of earlier versions); None without either.

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
