"""How often intervals of scores contain the truth, and equal models are called different: `python
tests/measure/measure_intervals.py [draws]`.

A model is right on an image with a probability of its own over seeds; two models find mostly the same images hard.

1,000 draws, 2026-11. Two models that are equal on all images differ by Student's t in 0.00 to 0.12 with 2 seeds, 0.06
to 0.17 with 3, 0.18 to 0.42 with 10. Of 2 to 12 equal models any pair differs by Holm's method in 0.03 to 0.06; the
interval of the best contains its truth in 0.94 to 0.96 (2 models) and 0.78 to 0.90 (12).

Images in groups of 3 to 29 with an effect of their own on both models, and one on each (`of_groups`): see
docs/reviewing.md.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
from scipy.special import expit, ndtri

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.evaluate import differences, intervals
from pipeline.evaluate.classify import in_groups
from pipeline.evaluate.measures import r2

# Mean and deviation of the logits of the probabilities: accuracies of 0.50, 0.82 and 0.98 on all images.
MODELS = ((0.0, 6.0), (4.0, 4.0), (12.0, 5.5))
# Correlation of the logits of two models.
ALIKE = 0.9
IMAGES = (20, 100, 1000, 10_000)


def of_two_models(rng: np.random.Generator, model: tuple[float, float], num_images: int, seeds: int, draws: int) -> str:
    """Share of draws in which two models that are equal on all images differ with p < 0.05, by Student's t."""
    called = []
    for _ in range(draws):
        shared, own = rng.normal(size=num_images), rng.normal(size=(2, num_images))
        likely = expit(model[0] + model[1] * (ALIKE**0.5 * shared + (1 - ALIKE) ** 0.5 * own))
        first, second = (rng.random((seeds, 2, num_images)) < likely).mean(2).T.tolist()
        called.append(differences.of_seeds(first, second, num_images).p < differences.LEVEL)
    return f"{np.mean(called):.3f}"


def of_groups(rng: np.random.Generator, num_groups: int, mean: float, deviation: float, draws: int) -> str:
    """One model on images in groups, and two that are equal on all groups there could be; with what ignores the groups
    beside it.

    mean, deviation: of the logits of the groups' accuracies.
    """
    everywhere = float(expit(mean + deviation * ndtri((np.arange(10**5) + 0.5) / 10**5)).mean())
    inside, called = [], []
    for _ in range(draws):
        sizes = rng.integers(3, 30, num_groups)
        groups = np.repeat(np.arange(num_groups), sizes)
        effects = deviation * rng.normal(size=num_groups)
        right = rng.random(len(groups)) < expit(mean + effects)[groups]
        numbers = (intervals.effective_number(*in_groups(right, groups)), len(groups))
        found = [intervals.of_samples(float(right.mean()), number) for number in numbers]
        inside.append([interval.low <= everywhere <= interval.high for interval in found])
        own = 0.8 * rng.normal(size=num_groups)
        first, second = (rng.random(len(groups)) < expit(mean + effects + sign * own)[groups] for sign in (1, -1))
        tests = differences.of_same_groups(first, second, groups), differences.of_same_images(first, second)
        called.append([test.p < differences.LEVEL for test in tests])
    (grouped, plain), (by_group, by_image) = np.mean(inside, axis=0), np.mean(called, axis=0)
    return (
        f"accuracy {everywhere:.2f}: interval over groups contains the truth {grouped:.3f}, over images {plain:.3f};"
        f" equal models differ over groups {by_group:.3f}, over images {by_image:.3f}"
    )


def of_numbers(rng: np.random.Generator, num_groups: int, draws: int) -> str:
    """R2 of images in groups of 3 to 29: coverage of the bootstrap's interval over groups, and over images. Values
    and errors have a part that is the group's.
    """

    def images(count: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        groups = np.repeat(np.arange(count), rng.integers(3, 30, count))
        parts = [rng.normal(size=count)[groups] + rng.normal(size=len(groups)) for _ in range(4)]
        return groups, parts[0], [parts[0] + 0.5 * parts[1] + 0.3 * own for own in parts[2:]]

    _, true, models = images(20_000)
    everywhere = r2(true, models[0], np.ones(len(true)))
    inside = []
    for _ in range(draws):
        groups, true, models = images(num_groups)

        def measure(weights: np.ndarray, true: np.ndarray = true, model: np.ndarray = models[0]) -> np.ndarray:
            return np.array([r2(true, model, weights)])

        found = [intervals.bootstrapped(measure, [intervals.EXPLAINED], len(true), of)[1:, 0] for of in (groups, None)]
        inside.append([low <= everywhere <= high for low, high in found])
    grouped, plain = np.mean(inside, axis=0)
    return f"R2 {everywhere:.2f}: interval over groups contains the truth {grouped:.3f}, over images {plain:.3f}"


def of_many_models(rng: np.random.Generator, num_models: int, seeds: int, draws: int) -> str:
    """Equal models: how often any pair is called different by Holm's method, and how often the interval of the best
    contains the truth.
    """
    called, inside = [], []
    for _ in range(draws):
        scores = np.array(sorted(rng.normal(0.8, 0.004, (num_models, seeds)).tolist(), key=np.mean))
        found = [differences.of_seeds(first, second) for first, second in itertools.combinations(scores, 2)]
        called.append(min(differences.holm([one.p for one in found])) < differences.LEVEL)
        best = intervals.of_seeds(scores[-1])
        inside.append(best.low <= 0.8 <= best.high)
    return (
        f"any pair called different {np.mean(called):.3f}, interval of the best contains its truth"
        f" {np.mean(inside):.3f}"
    )


def main(draws: int) -> None:
    rng = np.random.default_rng(0)
    for model, num_images, seeds in itertools.product(MODELS, IMAGES, (2, 3, 10)):
        called = of_two_models(rng, model, num_images, seeds, draws)
        print(f"{num_images:6,} images, {seeds:2} seeds: equal models differ {called}", flush=True)
    for num_models, seeds in itertools.product((2, 4, 12), (2, 3, 10)):
        print(
            f"{num_models:2} equal models, {seeds:2} seeds: {of_many_models(rng, num_models, seeds, draws)}", flush=True
        )
    rng, kinds = np.random.default_rng(1), ((0, 1.5), (1.5, 1.5), (4, 2), (1.5, 0))
    for num_groups, kind in itertools.product((2, 5, 100), kinds):
        found = of_groups(rng, num_groups, *kind, draws)
        print(f"{num_groups:3} groups, deviation {kind[1]}: {found}", flush=True)
    for num_groups in (3, 5):
        print(f"{num_groups:3} groups, numbers: {of_numbers(rng, num_groups, draws // 4)}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
