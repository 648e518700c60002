"""The ViT paper's fine-tuning protocol (B.1.1): choose the learning rate on a dev split, then train on all data, once
per seed.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.page import Block, Heading, Paragraph, PngImage, Table
from pipeline.base.trained_on import TRAINED_BY, not_held_out
from pipeline.base.words import counted
from pipeline.cluster.ray_tasks import RunJobs
from pipeline.data.dataset.manifest import location_and_split, open_dataset
from pipeline.data.mixture.run_data import open_run_data
from pipeline.evaluate.intervals import of_seeds, sample_deviation
from pipeline.experiment import plan
from pipeline.experiment.engine import Experiment, ExperimentAnswer
from pipeline.experiment.identity import sources_of
from pipeline.experiment.page import ExperimentPage, facts_of_splits, tags_of_folder, uri_of_runs
from pipeline.experiment.rate_figures import draw_finals, draw_rates_of_grid
from pipeline.experiment.spec import RunSpec, ScoresFile, make_spec
from pipeline.experiment.table import TO_RUN, Row
from pipeline.model.files import find_file
from pipeline.monitor.metrics_file import accepted_name
from pipeline.monitor.mlflow.state import run_of_weights
from pipeline.monitor.origin import find_origin
from pipeline.monitor.run_page import RunFacts, hide_passwords
from pipeline.settings import schema
from pipeline.settings.commands.reports import GridConfig
from pipeline.settings.commands.weights import ScoreConfig

# top1_std is the deviation over seeds.
_TAKEN = "std"


def run(config: GridConfig, run_jobs: RunJobs | None = None) -> dict[str, Any] | None:
    """Run the grid, write its report, and return the content of results.json; None if only a plan, a script or one run
    was asked for.

    Its keys: lr (the chosen one), trials (lr, top1 on dev, loss; or lr, diverged: reason), runs (seed, top1), top1
    (mean), std (over seeds, of n - 1; None for one seed), also (data set -> the same). Shares are in [0, 1]. Raises
    UserError when a run fails or all trials diverge; exits with code 75 when a run was asked to stop.
    """
    return plan.start(Grid, config, run_jobs)


class Grid(Experiment):
    """Trials of each learning rate, then the final runs. Raises UserError for what can be seen to be wrong without
    training.
    """

    kind, score = "grid", "top1"

    def __init__(self, config: GridConfig) -> None:
        self.config, self.folder, self.notes = config, Path(config.out) / config.name, []
        seed = config.seeds[0]
        trials = [make_run(config, config.trial_name(lr), lr, seed, config.dev_share) for lr in config.lr]
        final = make_run(config, "final", config.lr[0], seed, dev_share=0.0)  # To be refused before the trials.
        names = tuple(trial.name for trial in trials)
        self.rates = dict(zip(names, config.lr, strict=True))
        finals = [
            replace(final, name=f"final-seed-{seed}", needs=names, choose=self._choice(seed)) for seed in config.seeds
        ]
        self.specs = [*trials, *finals]
        self.run_config = trials[0].config
        self.dataset = open_dataset(self.run_config.data.path)
        self.num_train, self._by_number = _check_data(trials[0], config)
        self._also: dict[str, Any] = {}
        self.shared = sources_of(trials)

    def _choice(self, seed: int) -> Any:
        def choose(rows: Mapping[str, Row]) -> RunSpec | None:
            if any(rows[name].state in TO_RUN for name in self.rates):
                return None
            best, _ = best_rate(self._tried(rows.values()))
            return make_run(self.config, f"final-seed-{seed}", best, seed, dev_share=0.0)

        return choose

    def _tried(self, rows: Any) -> list[dict[str, Any]]:
        """The trials that have ended: lr, top1 on dev, loss, num_samples; or lr, diverged: reason."""
        tried = []
        for row in rows:
            if row.group != "trials":
                continue
            if row.state == "diverged":
                tried.append({"lr": self.rates[row.name], "diverged": f"{row.folder}: {row.reason}"})
            elif row.state == "done":
                scores = {"top1": row.scores["top1"], "loss": row.loss, "num_samples": row.num_test["top1"]}
                tried.append({"lr": self.rates[row.name], **scores})
        return tried

    def answer(self, rows: Sequence[Row]) -> ExperimentAnswer:
        config, tried = self.config, self._tried(rows)
        _refuse_other_weights(rows)
        if lost := [row for row in rows if row.group == "finals" and row.state == "diverged"]:
            raise UserError(f"{lost[0].folder}: {lost[0].reason} Or leave its learning rate out of lr.")
        finals = [row for row in rows if row.group == "finals" and row.state == "done"]
        runs = [
            {
                "seed": row.seed,
                "top1": row.scores["top1"],
                "num_samples": row.num_test["top1"],
                "effective_images": row.effective_images.get("top1", row.num_test["top1"]),
            }
            for row in finals
        ]
        best = best_rate(tried)[0] if runs else None
        split, data = self.run_config.data.eval_split, self.run_config.data.path
        pictures = {"accuracy_by_learning_rate.png": draw_rates_of_grid(tried, best)} if tried else {}
        if runs:
            pictures["final_accuracy.png"] = draw_finals(runs, split)
        found = ExperimentAnswer({"runs_done": len(tried) + len(runs)}, pictures=pictures)
        if best is None or len(runs) < len(config.seeds):
            return found
        names = data_names(config.also)
        for entry, name in names.items():
            if entry not in self._also:
                self._also[entry] = _scores_on(entry, name.folder, finals, entry not in self._by_number)
        result = {
            "name": config.name,
            "run": config.run,
            "settings": [hide_passwords(text) for text in config.settings],
            "lr": best,
            "dev_share": config.dev_share,
            "weights": self.run_config.init.weights,
            "data": data,
            "split": split,
            TRAINED_BY: json_record.read(Path(finals[-1].folder) / "scores.json", ScoresFile).trained_by,
            "trials": tried,
            "runs": runs,
            **mean_and_deviation([row["top1"] for row in runs]),
            "also": self._also,
            "num_train": self.num_train,
        }
        found.metrics |= {"top1": result["top1"], "best_lr": best}
        found.metrics |= {"top1_std": result["std"]} if result["std"] is not None else {}
        found.metrics |= {f"top1_{names[entry].metric}": scores["top1"] for entry, scores in self._also.items()}
        spread = "" if result["std"] is None else f" ± {100 * result['std']:.2f} (standard deviation)"
        found.summary = (
            f"**Result**: {100 * result['top1']:.2f} % top-1{spread} on {split}, {counted(len(runs), 'seed')}, with"
            f" learning rate {best:g}."
        )
        found.title, found.result = f"{config.name}: {100 * result['top1']:.2f} % top-1", result
        figures = (PngImage(name, name.removesuffix(".png").replace("_", " "), png) for name, png in pictures.items())
        found.blocks = [*page(result), *figures]
        found.files = {"results.json": json.dumps(result, indent=1, ensure_ascii=False)}
        return found

    def page(self) -> ExperimentPage | None:
        config, run, dataset = self.config, self.run_config, self.dataset
        if not (uri := uri_of_runs(config.mlflow, run.track, config.out)):
            return None
        weights, origin = str(run.init.weights), None
        with contextlib.suppress(UserError, OSError):  # The first run says what is wrong with them.
            origin = find_origin(find_file(Path(weights)), weights)
        parent = origin.run_id if origin else run_of_weights(weights)
        description = (
            f"**Fine-tuning grid** from `{weights}` on **{dataset.path.name}** (fingerprint `{dataset.fingerprint}`):"
            f" {len(config.lr)} learning rates are tried on {100 * config.dev_share:g} % of"
            f" {counted(self.num_train, 'image')}, held out; the best one trains on all of them,"
            f" {counted(len(config.seeds), 'seed')}. {counted(len(self.specs), 'run')}, which are shown below this one."
        )
        facts = RunFacts(
            config.name,
            "grid",
            {name: getattr(config, name) for name in ("run", "settings", "lr", "seeds", "dev_share", "also")},
            {"weights": weights, **tags_of_folder(self.folder, dataset)},
            facts_of_splits(dataset, run.data),
            description,
            {"parent": parent} if parent else {},
            score="top1",
            origin=origin,
        )
        return ExperimentPage(facts, self.folder, Path(config.out), uri, run.track.experiment)


def make_run(config: GridConfig, name: str, lr: float, seed: int, dev_share: float) -> RunSpec:
    """One run. Raises UserError for a settings file that cannot be used."""
    overrides = [
        *config.settings,
        f"name={name}",
        f"out={Path(config.out) / config.name}",
        f"optimizer.lr={lr!r}",
        f"seed={seed}",
        f"data.dev_share={dev_share!r}",
    ]
    if dev_share:  # It names a metric of data.eval_split, which only the final runs are scored on.
        overrides.append("checkpoint.best=")
    run = make_spec(name, "finetune", config.run, overrides, group="trials" if dev_share else "finals")
    if run.config.init.weights is None:
        raise UserError(f"{config.run} has no init.weights: set settings=[init.weights=...].")
    return run


def _check_data(trial: RunSpec, config: GridConfig) -> tuple[int, set[str]]:
    """Returns (the number of images that the final runs train on, by_number).

    by_number: those of config.also whose classes have other names, and are matched by number.

    Raises UserError for splits and data sets that would fail in the final runs, after days.
    """
    settings, seed = trial.config.data, trial.config.seed
    if not trial.config.needs_labels:
        raise UserError(
            f"train.loss = {trial.config.train.loss} predicts no classes, and a rate is chosen by accuracy. Use"
            " train.loss=softmax, say."
        )
    dataset = open_dataset(settings.path)
    dataset.refuse_without_labels("data.path", "Fine-tuning needs some.")
    if not settings.eval_split:
        raise UserError("data.eval_split is empty, but the final runs are scored on it. Name a split.")
    for share in (config.dev_share, 0.0):
        opened = open_run_data(
            replace(settings, dev_share=share), seed, trial.config.train.global_batch, trial.config.labels
        )
    if settings.eval_split in opened.not_held_out(opened.trained_on(trial.config.name)):
        raise UserError(
            f"data.eval_split = {settings.eval_split} is trained on, but the final runs are scored on it. Name another"
            " split."
        )
    by_number = set()
    for data in config.also:
        path, split = location_and_split(data)
        other = open_dataset(path)
        other.split(split or "val")
        if not set(other.classes) <= set(opened.dataset.classes):
            _check_order(data, other.classes, settings.path, opened.dataset.classes)
            by_number.add(data)
    data_names(config.also)
    return len(opened.split), by_number


def _check_order(data: str, classes: list[str], path: str, trained: list[str]) -> None:
    """Raise UserError unless class numbers can mean the same in `trained`, the classes of the runs, as in `classes` of
    config.also.
    """
    if len(classes) != len(trained):
        raise UserError(
            f"also: {data} has {counted(len(classes), 'class')}, {path} has {len(trained):,}. They must be among these,"
            " or as many in the same order."
        )
    number = {name: n for n, name in enumerate(trained)}
    if moved := next((name for n, name in enumerate(classes) if number.get(name, n) != n), None):
        raise UserError(
            f"also: {quoted(moved)} is class {classes.index(moved)} of {data}, and class {number[moved]} of {path}."
            " Where some classes have other names, all must be in the same order (class_list of launch/shard.py)."
        )


def _refuse_other_weights(rows: Sequence[Row]) -> None:
    """Raise UserError if runs began with different weights: a run that init.weights names may have trained on
    meanwhile.
    """
    began = {row.weights: row.folder for row in rows if row.weights}
    if len(began) > 1:
        listed = " and ".join(f"{folder} with {sha256[:16]}" for sha256, folder in began.items())
        raise UserError(
            f"The runs of this grid began with different weights, {listed}, so their scores cannot be compared. Name"
            " one checkpoint (settings=[init.weights=RUN/checkpoints/step-...]) and start another grid with name=..."
        )


def best_rate(tried: list[dict[str, Any]]) -> tuple[float, int]:
    """Returns (learning rate with the highest dev accuracy, number of dev images). Ties: the lower loss.

    Raises UserError if all diverged.
    """
    scored = [trial for trial in tried if "diverged" not in trial]
    if not scored:
        raise UserError(f"every learning rate diverged; of the first: {tried[0]['diverged']} Add lower ones to lr.")
    best = min(scored, key=lambda trial: (-trial["top1"], trial["loss"]))
    return best["lr"], best["num_samples"]


def mean_and_deviation(accuracies: list[float]) -> dict[str, float | None]:
    """top1 (the mean) and std (the sample deviation, None for a single one)."""
    return {"top1": float(np.mean(accuracies)), "std": sample_deviation(accuracies)}


def page(result: dict[str, Any]) -> list[Block]:
    """The report: the score, the trials, each run."""
    accuracies = [run["top1"] for run in result["runs"]]
    rows = [
        (
            f"{result['data']}, {result['split']}",
            _score_text(result, accuracies, result["runs"][0]["num_samples"]),
            f"{result['runs'][0]['num_samples']:,}",
        )
    ]
    for data, scores in result["also"].items():
        rows.append(
            (data, _score_text(scores, scores["of_seeds"], scores["num_samples"]), f"{scores['num_samples']:,}")
        )
    trials = [
        (
            (f"{trial['lr']:g}", "diverged", "-")
            if "diverged" in trial
            else (f"{trial['lr']:g}", f"{100 * trial['top1']:.2f}", f"{trial['loss']:.4f}")
        )
        for trial in result["trials"]
    ]
    chosen = frozenset(i for i, trial in enumerate(result["trials"]) if trial["lr"] == result["lr"])
    spread = ": mean ± standard deviation" if len(accuracies) > 1 else ""
    return [
        Paragraph(f"Weights {result['weights']}, run {result['run']} {' '.join(result['settings'])}".rstrip() + "."),
        *([Paragraph(f"{not_held_out(result['split'], runs)}.")] if (runs := result[TRAINED_BY]) else []),
        Table(("data", f"top-1, %{spread}", "images"), rows),
        Heading("Choice of the learning rate"),
        Paragraph(
            f"On {counted(best_rate(result['trials'])[1], 'image')} of the"
            f" {counted(result['num_train'], 'training image')}, held out at random (dev_share ="
            f" {result['dev_share']:g}); the final runs then train on all of them, with the rate in bold."
        ),
        Table(("lr", "top-1 on dev, %", "loss"), trials, chosen),
        Heading("Final runs"),
        Table(("seed", "top-1, %"), [(f"{run['seed']}", f"{100 * run['top1']:.2f}") for run in result["runs"]]),
    ]


def _score_text(scores: dict[str, Any], accuracies: list[float], num_test: int) -> str:
    if len(accuracies) == 1:
        return f"{100 * scores['top1']:.2f}"
    interval = of_seeds(accuracies, num_test)
    spread = f"95 % interval of the mean {100 * interval.low:.2f} to {100 * interval.high:.2f}"
    return f"{100 * scores['top1']:.2f} ± {100 * scores['std']:.2f} ({spread})"


def _scores_on(data: str, name: str, finals: Sequence[Row], match_classes: bool) -> dict[str, Any]:
    """Scores of the final runs on another data set, `folder` or `folder:split`. name: of the folder of each one's
    report.
    """
    from pipeline.evaluate import score_report  # Late: the import takes seconds.

    path, split = location_and_split(data)
    found = []
    for final in finals:
        settings = [
            f"weights={final.folder}",
            f"data={path}",
            f"split={split or 'val'}",
            f"out={final.folder}/evaluate/{name}",
            "shots=0",
            f"match_classes={json.dumps(match_classes)}",
        ]
        found.append(score_report.run(schema.load(ScoreConfig, None, settings)))
    accuracies = [scores["top1"] for scores in found]
    return {**mean_and_deviation(accuracies), "of_seeds": accuracies, "num_samples": found[0]["num_samples"]}


# -------------------------------------------------------------------- names of the data sets of `also`, in metrics and
# in folders of reports
class DataName(NamedTuple):
    """metric: what follows top1_, as "pets_test". folder: of the report in <run>/evaluate, as "pets-test"."""

    metric: str
    folder: str


def data_names(entries: Sequence[str]) -> dict[str, DataName]:
    """Entry, `folder` or `folder:split` -> its names, which no other entry has: of its last folder, or as many above it
    as tell them apart.

    Raises UserError where none do.
    """
    # Once, because it may ask the store of a URL.
    found = {entry: location_and_split(entry) for entry in entries}
    paths = {entry: PurePosixPath(place.rpartition("://")[2].partition("?")[0]) for entry, (place, _) in found.items()}
    names: dict[str, DataName] = {}
    for depth in range(1, 1 + max((len(path.parts) for path in paths.values()), default=1)):
        for entry, (_, split) in found.items():
            name = "_".join(part.strip("/").replace(":", "_") for part in paths[entry].parts[-depth:])
            names[entry] = DataName(accepted_name(name + f"_{split}" * bool(split)), f"{name}-{split or 'val'}")
        metrics, folders = ({getattr(name, kind) for name in names.values()} for kind in DataName._fields)
        if len(metrics) == len(folders) == len(names) and _TAKEN not in metrics:
            return names
    raise UserError(
        f"also: the scores on {' and '.join(entries)} would have one name. Leave one out, or rename a folder."
    )
