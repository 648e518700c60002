"""The ViT paper's fine-tuning protocol (B.1.1): choose the learning rate on a dev split, then train on all data, once
per seed.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.page import render
from pipeline.base.trained_on import TRAINED_BY, not_held_out
from pipeline.base.words import counted
from pipeline.cluster.ray_tasks import RunJobs
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.mixture.run_data import open_run_data
from pipeline.evaluate.intervals import of_seeds, sample_deviation
from pipeline.experiment.engine import Experiment, ExperimentAnswer, sources_of, start
from pipeline.experiment.spec import SCORES_FILE, RunSpec, ScoresFile, make_spec
from pipeline.experiment.table import TEMPLATES, TO_RUN, Row
from pipeline.model.files import find_file
from pipeline.monitor.origin import find_origin
from pipeline.monitor.run_page import RunFacts, hide_passwords
from pipeline.settings.commands.reports import GridConfig


def run(config: GridConfig, run_jobs: RunJobs | None = None) -> dict[str, Any] | None:
    """Run the grid, write its report, and return the content of results.json; None if only a plan, a script or one run
    was asked for.

    Its keys: lr (the chosen one), trials (lr, top1 on dev, loss; or lr, diverged: reason), runs (seed, top1), the
    `summary_of` these. Shares are in [0, 1]. Raises UserError when a run fails or all trials diverge; exits with code
    75 when a run was asked to stop.
    """
    return start(Grid, config, run_jobs)


class Grid(Experiment):
    """Trials of each learning rate, then the final runs. Raises UserError for what can be seen to be wrong without
    training.
    """

    kind, score = "grid", "top1"

    def __init__(self, config: GridConfig) -> None:
        self.config, self.folder, self.notes = config, Path(config.out) / config.name, []
        seed = config.seeds[0]
        trials = [make_run(config, f"lr-{lr:g}", lr, seed, config.dev_share) for lr in config.lr]
        final = make_run(config, "final", config.lr[0], seed, dev_share=0.0)  # To be refused before the trials.
        self.rates = {trial.name: trial.config.optimizer.lr for trial in trials}
        self.run_config = trials[0].config
        self.dataset = open_dataset(self.run_config.data.path)
        facts = _check_data(trials[0], config)
        self.specs = [replace(trial, facts=facts[config.dev_share]) for trial in trials]
        for seed in config.seeds:
            choose = partial(self._choose, seed)
            name, needs = f"final-seed-{seed}", tuple(self.rates)
            self.specs.append(replace(final, name=name, needs=needs, choose=choose, facts=facts[0.0]))
        self.shared = sources_of(trials)

    def _choose(self, seed: int, rows: Mapping[str, Row]) -> RunSpec | None:
        if any(rows[name].state in TO_RUN for name in self.rates):
            return None
        best = best_rate(self._tried(rows.values()))
        return replace(make_run(self.config, f"final-seed-{seed}", best, seed, 0.0), facts=self.specs[-1].facts)

    def _tried(self, rows: Any) -> list[dict[str, Any]]:
        """The trials that have ended: lr, top1 on dev, loss, num_samples; or lr, diverged: reason."""
        tried = []
        for row in rows:
            if row.name in self.rates and row.state in ("done", "diverged"):
                found: dict[str, Any] = {"diverged": f"{row.folder}: {row.reason}"}
                if row.state == "done":
                    found = {"top1": row.scores["top1"], "loss": row.loss, "num_samples": row.num_test["top1"]}
                tried.append({"lr": self.rates[row.name], **found})
        return tried

    def answer(self, rows: Sequence[Row]) -> ExperimentAnswer:
        config, tried = self.config, self._tried(rows)
        _refuse_other_weights(rows)
        if lost := [row for row in rows if row.group == "finals" and row.state == "diverged"]:
            raise UserError(f"{lost[0].folder}: {lost[0].reason} Or leave its learning rate out of lr.")
        finals = [row for row in rows if row.group == "finals" and row.state == "done"]
        answer = ExperimentAnswer({"runs_done": len(tried) + len(finals)})
        if len(finals) < len(config.seeds):
            return answer
        best = best_rate(tried)
        num = finals[0].num_test["top1"]
        runs = [
            {
                "seed": row.seed,
                "top1": row.scores["top1"],
                "num_samples": num,
                "effective_images": row.effective_images.get("top1", num),
            }
            for row in finals
        ]
        result = {
            **{name: getattr(config, name) for name in ("name", "run", "dev_share")},
            "settings": [hide_passwords(text) for text in config.settings],
            "lr": best,
            "weights": self.run_config.init.weights,
            "data": self.run_config.data.path,
            "split": self.run_config.data.eval_split,
            TRAINED_BY: json_record.read(Path(finals[-1].folder) / SCORES_FILE, ScoresFile).trained_by,
            "trials": tried,
            "runs": runs,
            **summary_of([row.scores["top1"] for row in finals], num),
            "num_train": finals[0].data_size,
        }
        answer.metrics |= {"top1": result["top1"], "best_lr": best}
        answer.metrics |= {"top1_std": result["std"]} if result["std"] is not None else {}
        spread = "" if result["std"] is None else f" ± {100 * result['std']:.2f} (standard deviation)"
        answer.summary = (
            f"**Result**: {100 * result['top1']:.2f} % top-1{spread} on {result['split']},"
            f" {counted(len(runs), 'seed')}, with learning rate {best:g}."
        )
        title = f"{config.name}: {100 * result['top1']:.2f} % top-1"
        answer.files |= render(TEMPLATES / "grid.j2", title, result=result, not_held_out=not_held_out)
        answer.files["results.json"] = json.dumps(result, indent=1, ensure_ascii=False)
        answer.result = result
        return answer

    def facts(self) -> RunFacts:
        config, run, dataset = self.config, self.run_config, self.dataset
        weights, origin = str(run.init.weights), None
        with contextlib.suppress(UserError, OSError):  # The first run says what is wrong with them.
            origin = find_origin(find_file(Path(weights)), weights)
        description = (
            f"**Fine-tuning grid** from `{weights}` on **{dataset.path.name}**: {counted(len(self.specs), 'run')},"
            " which are shown below this one."
        )
        return self.facts_on(
            dataset,
            run.data,
            {name: getattr(config, name) for name in ("run", "settings", "lr", "seeds", "dev_share")},
            {"weights": weights},
            description=description,
            parents={"parent": origin.run_id} if origin and origin.run_id else {},
            score="top1",
            origin=origin,
        )


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


def _check_data(trial: RunSpec, config: GridConfig) -> dict[float, dict[str, Any]]:
    """The facts of the runs with each dev_share. Raises UserError for splits that would fail in the final runs, after
    days.
    """
    run, settings = trial.config, trial.config.data
    if not run.needs_labels:
        raise UserError(
            f"train.loss = {run.train.loss} predicts no classes, and a rate is chosen by accuracy. Use"
            " train.loss=softmax, say."
        )
    open_dataset(settings.path).refuse_without_labels("data.path", "Fine-tuning needs some.")
    if not settings.eval_split:
        raise UserError("data.eval_split is empty, but the final runs are scored on it. Name a split.")
    facts = {}
    for share in (config.dev_share, 0.0):
        opened = open_run_data(replace(settings, dev_share=share), run.seed, run.labels)
        steps = run.train.length.steps(opened.epoch_samples, run.train.global_batch)
        images = steps * run.train.global_batch
        facts[share] = {"data_size": len(opened.split), "steps": steps, "images_seen": images}
    if settings.eval_split in opened.not_held_out(opened.trained_on(run.name)):
        raise UserError(
            f"data.eval_split = {settings.eval_split} is trained on, but the final runs are scored on it. Name another"
            " split."
        )
    return facts


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


def best_rate(tried: list[dict[str, Any]]) -> float:
    """The learning rate with the highest dev accuracy. Ties: the lower loss.

    Raises UserError if all diverged.
    """
    scored = [trial for trial in tried if "diverged" not in trial]
    if not scored:
        raise UserError(f"every learning rate diverged; of the first: {tried[0]['diverged']} Add lower ones to lr.")
    return float(min(scored, key=lambda trial: (-trial["top1"], trial["loss"]))["lr"])


def summary_of(accuracies: list[float], num_test: int) -> dict[str, Any]:
    """top1 (the mean), std (the sample deviation) and interval (95 %, of the mean); None for a single accuracy."""
    interval = of_seeds(accuracies, num_test) if len(accuracies) > 1 else None
    ends = [interval.low, interval.high] if interval else None
    return {"top1": float(np.mean(accuracies)), "std": sample_deviation(accuracies), "interval": ends}
