"""The MLflow page of a fine-tuning grid: a parent run, below which its runs, which send themselves, are shown."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.storage.atomic import write_files
from pipeline.model.files import find_file
from pipeline.monitor.mlflow.state import run_of_weights
from pipeline.monitor.origin import find_origin
from pipeline.monitor.page_folder import FIGURES, PageFolder
from pipeline.monitor.run_page import RunFacts, WeightsOrigin
from pipeline.settings.commands.reports import GridConfig
from pipeline.settings.run import RunConfig
from pipeline.transfer.track.data_names import data_names
from pipeline.transfer.track.figures import draw_finals, draw_rates_of_grid
from pipeline.transfer.track.parent_page import ParentPage, facts_of_splits, tags_of_folder


class GridPage(ParentPage):
    """Sends a grid. settings: of its first run. dataset: that they train on, the final ones on num_train images. num_runs: all runs."""

    def __init__(
        self, config: GridConfig, settings: RunConfig, dataset: Dataset, num_train: int, num_runs: int, uri: str
    ) -> None:
        facts = _facts(config, settings, dataset, num_train, num_runs)
        super().__init__(facts, Path(config.out) / config.name, Path(config.out), uri, settings.track.experiment)
        self._split = settings.data.eval_split

    def ended(
        self, folder: Path, tried: list[dict[str, Any]], runs: Sequence[dict[str, Any]] = (), best: float | None = None
    ) -> None:
        """A run has ended. tried, runs: the trials and final runs so far. best: the learning rate of the final ones."""
        self.has_run(folder)
        self.log({"runs_done": len(tried) + len(runs)})
        pictures = {"accuracy_by_learning_rate.png": draw_rates_of_grid(tried, best)}
        if runs:
            pictures["final_accuracy.png"] = draw_finals(runs, self._split)
        write_files(self.folder / FIGURES, pictures)

    def scored(self, result: dict[str, Any]) -> None:
        """results.json and report.md are written. result: content of results.json."""
        metrics = {"top1": result["top1"], "best_lr": result["lr"]}
        if result["std"] is not None:
            metrics["top1_std"] = result["std"]
        names = data_names(list(result["also"]))
        metrics |= {f"top1_{names[data].metric}": scores["top1"] for data, scores in result["also"].items()}
        self.log(metrics)
        spread = "" if result["std"] is None else f" ± {100 * result['std']:.2f} (standard deviation)"
        self.result = (
            f"**Result**: {100 * result['top1']:.2f} % top-1{spread} on {result['split']}, {counted(len(result['runs']), 'seed')}, with "
            f"learning rate {result['lr']:g}."
        )


def _origin(folder: Path, weights: str) -> WeightsOrigin | None:
    """The weights of a grid as its first start found them, or as they are now; None for weights that only MLflow names."""
    with contextlib.suppress(UserError):
        saved = PageFolder(folder).read_facts().facts
        if saved.tags.get("weights") == weights:
            return saved.origin
    with contextlib.suppress(UserError, OSError):  # The first run says what is wrong with them.
        return find_origin(find_file(Path(weights)), weights)
    return None


def _facts(config: GridConfig, settings: RunConfig, dataset: Dataset, num_train: int, num_runs: int) -> RunFacts:
    weights, data = settings.init.weights, settings.data
    origin = _origin(Path(config.out) / config.name, str(weights))
    parent = origin.run_id if origin else run_of_weights(str(weights))
    parameters = {
        "run": config.run,
        "settings": " ".join(config.settings),
        "lr": config.lr,
        "seeds": config.seeds,
        "dev_share": config.dev_share,
        "also": config.also,
    }
    tags = {"weights": str(weights), **tags_of_folder(Path(config.out) / config.name, dataset)}
    description = (
        f"**Fine-tuning grid** from `{weights}` on **{dataset.path.name}** (fingerprint `{dataset.fingerprint}`): "
        f"{len(config.lr)} learning rates are tried on {100 * config.dev_share:g} % of {counted(num_train, 'image')} of `{data.train_split}`, held out; the best "
        f"one trains on all of them, {counted(len(config.seeds), 'seed')}. {counted(num_runs, 'run')}, which are shown below this one."
    )
    # Of a mixture, the facts are of data.path, and num_train counts all sets.
    trained = {} if data.mix else {"training": num_train}
    splits = tuple(
        replace(facts, num_samples=trained.get(facts.context, facts.num_samples))
        for facts in facts_of_splits(dataset, data)
    )
    return RunFacts(
        config.name,
        "grid",
        parameters,
        tags,
        splits,
        description,
        {"parent": parent} if parent else {},
        artifacts=("report.md", "results.json"),
        score="top1",
        origin=origin,
    )
