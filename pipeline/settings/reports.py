"""The settings of what comes after runs: reports of sweeps, comparisons of runs, and the grid of a fine-tuning protocol."""

from dataclasses import dataclass

from pipeline.errors import UserError
from pipeline.json_record import quoted
from pipeline.settings.run import MAX_BATCH, MAX_SEED, MAX_THREADS
from pipeline.settings.schema import REQUIRED, setting


@dataclass(frozen=True, kw_only=True)
class VtabReportConfig:
    """The report of one or more sweeps over VTAB-1k's tasks."""

    sweeps: list[str] = setting(
        REQUIRED, "Folders of sweeps of launch/vtab.py; the first is reported, beside the others"
    )
    names: list[str] = setting(list, "What the report calls them, as many; empty is the folders' names.")
    out: str = setting("", "Folder of the report; empty is <first sweep>/report.", output="folder")
    mlflow: str = setting("", "MLflow tracking URI that the numbers and files are sent to; empty sends nothing.")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if not self.sweeps:
            raise UserError(
                "sweeps is empty. Name the folders of sweeps: sweeps=[runs/vit_b16/vtab/vit_paper-finetune]"
            )
        if self.names and len(self.names) != len(self.sweeps):
            raise UserError(f"names has {len(self.names)} names for {len(self.sweeps)} sweeps: give as many, or none.")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Two or more runs side by side."""

    runs: list[str] = setting(REQUIRED, "Run folders, as [runs/vit,runs/resnet]; of the same data and settings")
    split: str = setting("", "Split that they are scored on; empty is the first run's data.eval_split.")
    out: str = setting("", "Folder of the comparison; empty is runs/compare/<names>.", output="folder")
    batch: int = setting(64, "Images per forward pass.", most=MAX_BATCH)
    threads: int = setting(2, "Decoding threads.", most=MAX_THREADS)

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if len(self.runs) < 2 or len(set(self.runs)) < len(self.runs):
            raise UserError(
                f"runs = {quoted(self.runs)} must be two or more different runs: runs=[runs/vit,runs/resnet]"
            )


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """A fine-tuning protocol: learning rates tried on a part of the training data, the best used on all, several times."""

    name: str = setting(
        REQUIRED, "What the result is called; all runs are in <out>/<name>", output="folder", within="out"
    )
    run: str = setting(REQUIRED, "YAML file of the run, as configs/finetune/pets_384px.yaml")
    settings: list[str] = setting(list, "Settings of the run that win over its file, as [init.weights=runs/vit_l16].")
    lr: list[float] = setting(REQUIRED, "Values of optimizer.lr that are tried, as [0.001,0.003,0.01,0.03]")
    dev_share: float = setting(0.1, "Share of the training split that they are tried on (data.dev_share).")
    seeds: list[int] = setting(
        [0, 1, 2], "Of the final runs, on all of the training split; the first is also the trials'.", most=MAX_SEED
    )
    also: list[str] = setting(
        list,
        "Data sets that final weights are scored on besides, as [datasets/imagenet_real:val,datasets/imagenet_v2:test].",
    )
    launcher: str = setting("", "What starts a run, as 'deepspeed --num_gpus 8'; empty is one process.")
    out: str = setting("runs", "Folder that holds all runs.", output="folder")
    mlflow: str = setting("", "MLflow tracking URI that the table is sent to; empty sends nothing.")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UserError(f"name = {quoted(self.name)} must be a plain folder name.")
        lists: dict[str, list[float] | list[int]] = {"lr": self.lr, "seeds": self.seeds}
        for name, values in lists.items():
            if not values or len(set(values)) < len(values):
                raise UserError(f"{name} = {quoted(values)} must be at least one, and all different.")
        if not 0 < self.dev_share < 1:
            raise UserError(f"dev_share = {self.dev_share} must be above 0 and below 1.")
        taken = ("name=", "out=", "optimizer.lr=", "data.dev_share=", "seed=")
        if given := [setting for setting in self.settings if setting.startswith(taken)]:
            raise UserError(
                f"settings has {', '.join(given)}, which this command sets for each run itself: leave it out."
            )
