"""The MLflow page of a fine-tuning grid: a parent run, below which its runs, which send themselves, are shown."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.data.dataset.manifest import Dataset
from pipeline.evaluate.intervals import in_seeds
from pipeline.files import replacing
from pipeline.monitor.mlflow.mirror import one_line
from pipeline.monitor.mlflow.state import STATE_FILE, read_states, run_id_of, run_of_weights
from pipeline.monitor.mlflow.store import MlflowStore
from pipeline.monitor.page_folder import PAGE
from pipeline.monitor.run_page import DatasetFacts, RunFacts, hide_passwords
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.settings.reports import GridConfig
from pipeline.settings.run import RunConfig, TrackConfig
from pipeline.transfer.track.children import FIGURES, link_below
from pipeline.transfer.track.figures import draw_finals, draw_rates_of_grid

# How long the first run waits for its parent, in seconds: a fresh store takes several.
_WAIT = 60.0


def tracking_uri(config: GridConfig, track: TrackConfig) -> str:
    """Where a grid and its runs are sent to; "" for nowhere. track: of the runs, as their settings say."""
    if config.mlflow:
        return "" if config.mlflow == "none" else config.mlflow
    return (track.uri or default_uri(Path(config.out))) if track.enabled else ""


class GridPage:
    """Sends a grid. A context manager: on leaving, its runs are linked and the parent run ends.

    settings: of its first run. dataset: that they train on. num_runs: trials and final runs.
    """

    def __init__(self, config: GridConfig, settings: RunConfig, dataset: Dataset, num_runs: int, uri: str) -> None:
        self.folder, self.uri, self.num_runs = Path(config.out) / config.name, uri, num_runs
        self.tried: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.chosen: float | None = None
        self._split = settings.data.eval_split
        self._folders: list[Path] = []
        self._result = ""
        facts = _facts(config, settings, dataset, num_runs)
        track = TrackConfig(uri=uri, experiment=settings.track.experiment)
        self._tracker = Tracker(track, Path(config.out), self.folder, facts)
        self._parent, self._wait = "", _WAIT

    def __enter__(self) -> "GridPage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self._link()
            outcome = f"failed: {error}" if error else "finished"
            self._tracker.finish("FAILED" if error else "FINISHED", outcome=outcome, result=self._result)
        else:  # Asked to stop, or Ctrl-C.
            self._tracker.finish("KILLED", in_a_hurry=True, outcome="stopped: the same command continues")

    def tracking(self, track: TrackConfig) -> TrackConfig:
        """The settings with which a run sends itself below this one."""
        if not track.enabled:
            return track
        return replace(track, uri=self.uri, parent_run=self.parent_run())

    def parent_run(self) -> str:
        """ID of the parent; "" if the store has not answered in time. Then the runs are linked at the end."""
        if self._parent:
            return self._parent
        end, self._wait = time.monotonic() + self._wait, 1.0  # A store that is away is not waited for again.
        while time.monotonic() < end:
            states, _ = read_states(self.folder / STATE_FILE)
            state = states.get(hide_passwords(self.uri))
            # The state is of this start once its parameters are sent; before, its run may have been deleted.
            if state and state.run_id and state.has_parameters and self._is_active(state.run_id):
                self._parent = state.run_id
                return self._parent
            time.sleep(0.2)
        _warn(
            f"MLflow at {hide_passwords(self.uri)} has not answered: the runs of {self.folder} are linked to it later."
        )
        return ""

    def ended(self, folder: Path) -> None:
        """A run has ended; `tried`, `runs` and `chosen` are up to date."""
        self._folders.append(folder)
        self._tracker.log(0, {"runs_done": len(self.tried) + len(self.runs)})
        self._draw()

    def scored(self, result: dict[str, Any]) -> None:
        """results.json and report.md are written. result: content of results.json."""
        metrics = {"top1": result["top1"], "best_lr": result["lr"]}
        if result["std"] is not None:
            metrics["top1_std"] = result["std"]
        metrics |= {
            f"top1_{Path(data).name.replace(':', '_')}": scores["top1"] for data, scores in result["also"].items()
        }
        self._tracker.log(0, metrics)
        spread = "" if result["std"] is None else f" ± {100 * result['std']:.2f} (standard deviation)"
        self._result = (
            f"**Result**: {100 * result['top1']:.2f} % top-1{spread} on {result['split']}, {in_seeds(len(result['runs']))}, with "
            f"learning rate {result['lr']:g}."
        )

    def _is_active(self, run_id: str) -> bool:
        try:
            return MlflowStore(self.uri).is_active(run_id)
        except Exception:  # Whatever the server or its client raises: it is asked again.
            return False

    def _draw(self) -> None:
        pictures = {"accuracy_by_learning_rate.png": draw_rates_of_grid(self.tried, self.chosen)}
        if self.runs:
            pictures["final_accuracy.png"] = draw_finals(self.runs, self._split)
        folder = self.folder / PAGE / FIGURES
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in pictures.items():
            with replacing(folder / name) as file:
                file.write(content)

    def _link(self) -> None:
        """Link runs that were sent before the parent was known, as those of an earlier version."""
        try:
            sent = [folder for folder in self._folders if run_id_of(folder)]
            if sent and (parent := self.parent_run()):
                link_below(self.uri, sent, parent)
        except Exception as error:  # Whatever the server or its client raises.
            _warn(f"MLflow at {hide_passwords(self.uri)} did not link the runs of {self.folder} ({one_line(error)}).")


def _facts(config: GridConfig, settings: RunConfig, dataset: Dataset, num_runs: int) -> RunFacts:
    weights, data = settings.init.weights, settings.data
    parent = run_of_weights(str(weights))
    parameters = {
        "run": config.run, "settings": " ".join(config.settings), "lr": config.lr, "seeds": config.seeds,
        "dev_share": config.dev_share, "also": config.also,
    }  # fmt: skip
    tags = {
        "weights": str(weights),
        "data": dataset.fingerprint,
        "dataset": dataset.path.name,
        "run_folder_path": str((Path(config.out) / config.name).resolve()),
    }
    datasets = [
        DatasetFacts(
            dataset.path.name, str(dataset.path), dataset.fingerprint, split, dataset.info["samples"][split],
            dataset.num_classes, context,
        )
        for split, context in ((data.train_split, "training"), (data.eval_split, "evaluation"))
    ]  # fmt: skip
    description = (
        f"**Fine-tuning grid** from `{weights}` on **{dataset.path.name}** (fingerprint `{dataset.fingerprint}`): "
        f"{len(config.lr)} learning rates are tried on {100 * config.dev_share:g} % of `{data.train_split}`, held out; the best "
        f"one trains on all of it, {in_seeds(len(config.seeds))}. {num_runs} runs, which are shown below this one."
    )
    return RunFacts(
        config.name, "grid", parameters, tags, tuple(datasets), description, {"parent": parent} if parent else {},
        artifacts=("report.md", "results.json"),
    )  # fmt: skip


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)
