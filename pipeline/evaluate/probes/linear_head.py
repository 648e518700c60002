"""A linear head fitted to features: logistic regression, or ridge regression of numbers, whose weight decay is chosen
on held-out parts.

Shapes: n samples, M labels of each, D features, K classes or numbers, F folds, L decays.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluate.classify import probabilities_of
from pipeline.objectives import classification

FOLDS = 5
# Tried from the strongest on, until the held-out loss has risen twice in a row.
_DECAYS = [10.0 ** (exponent / 2) for exponent in range(2, -13, -1)]
_ITERATIONS = 200  # of L-BFGS, for each decay
_CHUNK = 2**24  # logits at a time
_ROWS = 2**14  # of features at a time, in float64


@dataclass(frozen=True)
class LinearHead:
    """weight: float32 (K, D). bias: (K,). decay: chosen, of weights for features with a deviation of 1.

    held_out: mean loss of samples that were held out, by decay. predicted: float32 (n, K), the probabilities or numbers
    of each sample by the head that was fitted without it, at the chosen decay.
    """

    weight: Tensor
    bias: Tensor
    decay: float
    held_out: dict[float, float]
    predicted: Tensor


def fit(
    features: Tensor,
    labels: Tensor,
    weights: Tensor,
    parts: np.ndarray,
    num_classes: int,
    kind: str,
) -> LinearHead:
    """Minimise the mean loss + decay / 2 * |W|^2 of standardised features, for the decay with the least held-out loss.

    features: float32 (n, D). labels: int64 (n, M), -1 where a sample has fewer. weights: float32 (n,), of each sample
    in the mean. parts: int64 (n,), the part, 0 to F - 1, in which a sample is held out. kind: "softmax" or "sigmoid".
    """
    mean, deviation = features.mean(0), features.std(0).clamp(min=1e-6)
    standard = (features - mean) / deviation
    held = torch.from_numpy(parts).to(features.device)

    def zeros() -> Tensor:
        return torch.zeros(num_classes, features.shape[1] + 1, device=features.device)

    learnt = [zeros() for _ in range(FOLDS)]
    held_out: dict[float, float] = {}
    best, chosen = _DECAYS[0], torch.empty(0)
    for decay in _DECAYS:
        predicted = torch.empty(len(labels), num_classes, device=features.device)
        for part in range(FOLDS):
            seen, unseen = held != part, held == part
            learnt[part] = _minimise(learnt[part], standard[seen], labels[seen], weights[seen], decay, kind)
            predicted[unseen] = _logits(learnt[part], standard[unseen])
        losses = classification.losses(predicted, labels, kind)
        held_out[decay] = float((losses * weights).sum() / weights.sum())
        if held_out[decay] == min(held_out.values()):
            best, chosen = decay, probabilities_of(predicted, kind)
        elif len(held_out) - list(held_out).index(best) > 2:
            break
    whole = _minimise(zeros(), standard, labels, weights, best, kind)
    weight = whole[:, :-1] / deviation
    return LinearHead(weight, whole[:, -1] - weight @ mean, best, held_out, chosen)


def fit_numbers(features: Tensor, targets: Tensor, parts: np.ndarray) -> LinearHead:
    """Minimise the mean squared error + decay * |W|^2 of standardised features and targets, for the decay with the
    least held-out error, which is the mean over the targets: 1 minus the mean R2.

    features: float32 (n, D). targets: float32 (n, K), NaN for a missing one. parts: as in `fit`.
    """
    mean, deviation = features.mean(0), features.std(0).clamp(min=1e-6)
    standard, held = (features - mean) / deviation, torch.from_numpy(parts).to(features.device)
    decays = torch.tensor(_DECAYS, dtype=torch.float64, device=features.device)
    heads, errors = [], torch.zeros_like(decays)
    of_decays = torch.full((*targets.shape, len(decays)), torch.nan, device=features.device)
    for number, values in enumerate(targets.T):
        present = values.isfinite()
        middle, unit = values[present].mean(), values[present].std(correction=0)
        unit = torch.where(unit > 0, unit, 1)
        rows = [present & (held == part) for part in range(FOLDS)]
        sums = [_products(standard[of], (values[of] - middle) / unit) for of in rows]
        for part, of in enumerate(rows):
            head = _ridge(torch.stack(sums[:part] + sums[part + 1 :]).sum(0), decays).float()
            of_decays[of, number] = (standard[of] @ head[:-1] + head[-1]) * unit + middle
        misses = (of_decays[present, number] - values[present, None]) / unit
        errors += misses.double().square().mean(0) / targets.shape[1]
        head = _ridge(torch.stack(sums).sum(0), decays).float() * unit
        head[-1] += middle
        heads.append(head)
    best = int(errors.argmin())
    whole = torch.stack([head[:, best] for head in heads])
    weight = whole[:, :-1] / deviation
    held_out = dict(zip(_DECAYS[: best + 3], errors.tolist(), strict=False))  # As many as `fit` tries.
    return LinearHead(weight, whole[:, -1] - weight @ mean, _DECAYS[best], held_out, of_decays[:, :, best])


def _products(features: Tensor, values: Tensor) -> Tensor:
    """float64 (D + 2, D + 2): the products of all pairs of features, a one and the value, summed over the samples."""
    total = torch.zeros(features.shape[1] + 2, features.shape[1] + 2, dtype=torch.float64, device=features.device)
    for x, y in zip(features.split(_ROWS), values.split(_ROWS), strict=True):
        rows = torch.cat([x, torch.ones_like(y)[:, None], y[:, None]], 1).double()
        total += rows.T @ rows
    return total


def _ridge(products: Tensor, decays: Tensor) -> Tensor:
    """float64 (D + 1, L): the weights and, in the last row, the bias at each decay; 0 of no samples. products: of
    `_products`.
    """
    means = products / products[-2, -2].clamp(min=1)
    mean = means[-2, [*range(len(products) - 2), -1]]
    scales, directions = torch.linalg.eigh(means[:-2, :-2] - mean[:-1, None] * mean[:-1])
    of_value = directions.T @ (means[:-2, -1] - mean[:-1] * mean[-1])
    weights = directions @ (of_value[:, None] / (scales.clamp(min=0)[:, None] + decays))
    return torch.cat([weights, (mean[-1] - mean[:-1] @ weights)[None]])


def _logits(head: Tensor, features: Tensor) -> Tensor:
    """(K, D + 1) and (n, D) -> (n, K)."""
    return features @ head[:, :-1].T + head[:, -1]


def _minimise(begin: Tensor, features: Tensor, labels: Tensor, weights: Tensor, decay: float, kind: str) -> Tensor:
    """The head (K, D + 1), with the bias in its last column, that L-BFGS finds from `begin`."""
    head = begin.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [head], max_iter=_ITERATIONS, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )
    chunk, total = max(1, _CHUNK // len(begin)), weights.sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = decay / 2 * head[:, :-1].square().sum()
        loss.backward()
        loss = loss.detach()
        for x, y, w in zip(features.split(chunk), labels.split(chunk), weights.split(chunk), strict=True):
            part = (classification.losses(_logits(head, x), y, kind) * w).sum() / total
            part.backward()
            loss += part.detach()
        return loss

    optimizer.step(closure)
    return head.detach()
