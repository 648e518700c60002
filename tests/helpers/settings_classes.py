"""All classes of settings."""

import importlib
import pkgutil
import typing

from pipeline import settings
from pipeline.settings.schema import Settings, is_section

for _module in pkgutil.walk_packages(settings.__path__, "pipeline.settings."):
    importlib.import_module(_module.name)


def _below(cls: type) -> list[type]:
    return [found for inner in cls.__subclasses__() for found in (inner, *_below(inner))]


# By name, of pipeline/settings only: tests and objectives have some, too.
_OWN = (cls for cls in _below(Settings) if cls.__module__.startswith("pipeline.settings."))
CLASSES = {cls.__name__: cls for cls in sorted(_OWN, key=lambda cls: cls.__name__)}
_SECTIONS = {
    inner
    for cls in CLASSES.values()
    for kind in typing.get_type_hints(cls).values()
    for inner in (kind, *typing.get_args(kind))
    if is_section(inner)
}
# Those of a command.
COMMANDS = [cls for cls in CLASSES.values() if cls not in _SECTIONS]
