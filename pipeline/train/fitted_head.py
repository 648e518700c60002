"""Fits a new head to the features of all training images before the first step (`init.fit_head`).

Shapes: n images, D features, K classes.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.loading.loader import Batch, normalise
from pipeline.data.loading.views import Views
from pipeline.evaluate.classify import each_sample, label_table
from pipeline.evaluate.probes import linear_head
from pipeline.evaluate.probes.linear_head import LinearHead
from pipeline.evaluate.probes.out_of_fold import divide
from pipeline.evaluate.split_reader import SplitReader
from pipeline.train.bookkeeping import StartingPoint, TrainingRun


def fit_head_on_all_ranks(start: StartingPoint) -> dict[str, float]:
    """Replace the head of the run's model by one fitted to its features of the training split.

    Each image is read once, by all ranks together; rank 0 fits. Returns metrics: the decay that was chosen, and the
    held-out accuracy or R2, and loss. Raises UserError for too few images.
    """
    config, split, ranks, model = start.config, start.data.split.parts[0], start.ranks, start.model
    targets = split.target_values if objectives.kind(config.train.loss).predicts == "targets" else None
    labels = label_table(split)
    is_known = (labels >= 0).any(1) if targets is None else np.isfinite(targets).any(1)
    model.eval().to(ranks.device)
    features, readable = _features_on_all_ranks(start)

    def fit() -> tuple[LinearHead, dict[str, float]]:
        usable = readable & np.isfinite(features).all((1, 2)) & is_known
        if usable.sum() < 2 * linear_head.FOLDS:
            what = "a class" if targets is None else "a number"
            raise UserError(
                f"init.fit_head needs {2 * linear_head.FOLDS} readable training images with {what}, and {split.name!r}"
                f" of {config.data.path} has {usable.sum()}. Leave it out."
            )
        num_views = features.shape[1]
        values = torch.from_numpy(features[usable].reshape(-1, features.shape[2])).to(ranks.device)
        known = (labels if targets is None else targets)[usable].repeat(num_views, axis=0)
        classes = labels[usable, 0] if targets is None else np.zeros(usable.sum(), np.int64)
        parts = divide(classes, linear_head.FOLDS, None if split.groups is None else split.groups[usable])
        parts = parts.repeat(num_views)
        if targets is None:
            # Each class counts as often as training draws it.
            weights = np.bincount(known[:, 0]).astype(np.float64)[known[:, 0]] ** (config.data.balance - 1)
            head = linear_head.fit(
                values,
                torch.from_numpy(known).to(ranks.device),
                torch.from_numpy(weights.astype(np.float32)).to(ranks.device),
                parts,
                start.data.dataset.num_classes,
                config.train.loss,
            )
            score = float((head.predicted.argmax(1).cpu().numpy()[:, None] == known).any(1).mean())
            metric, said = "head_held_out_top1", f"top-1 of the head {score:.2%}"
        else:
            head = linear_head.fit_numbers(values, torch.from_numpy(known).to(ranks.device), parts)
            score = 1 - head.held_out[head.decay]  # The loss is in variances of each target.
            metric, said = "head_held_out_r2", f"R2 of the head {score:.4f}"
        tried = ", ".join(f"{decay:.1g}: {loss:.3f}" for decay, loss in head.held_out.items())
        start.console.say(f"held-out {said}, with a weight decay of {head.decay:.1g} (held-out loss by decay: {tried})")
        return head, {"head_decay": head.decay, "head_held_out_loss": head.held_out[head.decay], metric: score}

    head, metrics = ranks.on_main(fit)
    with torch.no_grad():
        for name, value in (("weight", head.weight), ("bias", head.bias)):
            model.get_parameter(f"head.{name}").copy_(value)
    model.train()
    return metrics


def save_fitted_head_on_all_ranks(run: TrainingRun) -> None:
    """Record what was found, and commit step 0, so that a restart does not fit again."""
    if run.tracker:
        run.tracker.log(0, run.head_metrics)
    run.save_on_all_ranks()
    run.saver.wait()


def _features_on_all_ranks(start: StartingPoint) -> tuple[np.ndarray, np.ndarray]:
    """Features of all training images, float32 (n, V, D) of V views, and which images are readable."""
    config, split, ranks, model = start.config, start.data.split.parts[0], start.ranks, start.model
    count = config.init.fit_views
    start.console.say(f"init.fit_head: features of {counted(count, 'view')} of each training image")

    def features(batch: Batch) -> list[Tensor]:
        views = (normalise(view, ranks.device, torch.float32, model.config.pixels) for view in batch.views[0])
        return [torch.stack([model.features(view) for view in views], 1).float()]

    views = () if count == 1 else (Views(count, config.model.image_size, config.augment),)
    reader = SplitReader.of_run(config, split, ranks, model.config.pixels, views=views)
    (values,), readable, _ = each_sample(features, reader, np.arange(len(split)))
    return values, readable
