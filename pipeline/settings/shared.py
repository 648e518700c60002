"""Settings that several commands have."""

from pipeline.settings.quantities import RegularExpression
from pipeline.settings.schema import Settings, setting


class MlflowConfig(Settings):
    """Where a command sends its numbers and figures."""

    mlflow: str = ""
    """MLflow tracking URI for the numbers and figures; empty sends nothing."""
    experiment: str = setting("vit", needs="mlflow")
    """MLflow experiment, with mlflow."""


class GroupsConfig(Settings):
    """How a command finds the groups of images."""

    group_pattern: RegularExpression = ""
    """Regular expression that finds the group of an image, such as its patient or video, in its key (the path without
    extension, below its split or folder): what the first parentheses match, or all of it.
    '^[^/]+/(patient[0-9]+)' of cat/patient12_3.
    """
