"""The settings of commands that follow runs: their report, comparison and export, and a fine-tuning protocol's grid."""

from pydantic import PositiveFloat

from pipeline.settings.commands.study import ExperimentConfig, refuse_overrides
from pipeline.settings.quantities import PathText
from pipeline.settings.schema import Distinct, Seeds, Settings, setting

# Settings of a run that the grid sets itself.
_SET_BY_GRID = ("name=", "out=", "optimizer.lr=", "data.dev_share=", "seed=")


class CompareConfig(Settings):
    """A comparison of two or more runs."""

    runs: Distinct[PathText] = setting(min_items=2)
    """Runs, as [runs/vit,runs/resnet]: each the folder of a run, a grid or a sweep; also of different data"""
    out: PathText = setting("", output="folder", holds="comparison")
    """Folder of the comparison; empty is runs/compare/<names>."""


class RunReportConfig(Settings):
    """The report of one run."""

    run: PathText
    """The run: the folder of a run, a grid or a sweep"""
    out: PathText = setting("", output="folder", holds="report of a run")
    """Folder of the report; empty is <run>/review."""


class SyncConfig(Settings):
    """Sending run folders to MLflow afterwards."""

    runs: list[PathText]
    """Run folders, or folders that contain some, as [runs]"""
    uri: str = ""
    """MLflow tracking URI; empty is MLFLOW_TRACKING_URI, else where each run was sent to, else its <out>/mlflow.db."""


class GridConfig(ExperimentConfig):
    """A fine-tuning protocol: choose the learning rate on held-out training data, then train on all data, several
    times.
    """

    run: PathText
    """YAML file of the run, as configs/finetune/pets_384px.yaml"""
    settings: list[str] = []
    """Settings that override the run's file, as [init.weights=runs/vit_l16]."""
    lr: Distinct[PositiveFloat]
    """Values of optimizer.lr to try, as [0.001,0.003,0.01,0.03]"""
    dev_share: float = setting(0.1, above=0, below=1)
    """Share of the training split held out to choose lr (data.dev_share)."""
    seeds: Seeds = [0, 1, 2]
    """Seeds of the final runs on the whole training split; the first is also used for the trials."""

    def check(self) -> None:
        """Raise UserError for run settings that the grid sets itself."""
        super().check()
        refuse_overrides("settings has", self.settings, _SET_BY_GRID, "this command sets for each run: leave it out.")
