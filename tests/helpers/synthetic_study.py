"""Results of made-up studies with a known law, for tests of what follows from results."""

from dataclasses import replace

import numpy as np

from pipeline.experiment.table import Row, StudyResults

FLOOR, SCALE, EXPONENT = 0.1, 0.3, 0.3


def law(x: float, scale: float = SCALE, exponent: float = EXPONENT) -> float:
    return 1 - (FLOOR + scale * x**-exponent)


def cell(
    model: str,
    x: float,
    seed: int,
    score: float | None,
    question: str,
    state: str = "done",
) -> Row:
    """A cell at x images or exaFLOPs; score None: without one."""
    size, exaflops = (round(x), 0.01) if question in ("data_size", "labels") else (50_000, x)
    scores = {"top1": score} if score is not None else {}
    return Row(
        f"{model}-{x:g}-seed{seed}",
        model,
        seed,
        state,  # type: ignore[arg-type]
        "" if state == "done" else "the loss is not finite since step 12",
        scores,
        dict.fromkeys(scores, 10_000),
        hours=0.1 if state == "done" else None,
        parameters=1_000_000,
        data_size=size,
        steps=max(1, round(1000 * x)),
        images_seen=64_000,
        exaflops=exaflops,
    )


def study(question: str, cells: list[Row]) -> StudyResults:
    return StudyResults(
        "made-up",
        "top1",
        "datasets/made-up",
        "0123456789abcdef",
        "made-up:test",
        cells,
        counts_images=question in ("data_size", "labels"),
    )


def scaling(
    seeds: int = 3,
    noise: float = 0.003,
    budgets: tuple[float, ...] = (1, 2, 4, 8),
    models: int = 2,
) -> StudyResults:
    """By the law of Hoffmann et al. 2022: a larger model is worse on few exaFLOPs and better on many."""
    generator = np.random.default_rng(3)
    cells = []
    for kind, shift in (("ViT", 0.0), ("BiT", 0.02)):
        for number in range(models):
            size = 0.25 * 3**number
            for x in budgets:
                for seed in range(seeds):
                    error = 0.1 + shift + 0.1 * size**-0.5 + 0.14 * (x / size) ** -0.5
                    value = 1 - error + noise * generator.standard_normal()
                    cells.append(cell(f"{kind}-{number}", x, seed, float(value), "scaling"))
    return study("scaling", cells)


def data_size(
    seeds: int = 3, noise: float = 0.003, sizes: tuple[float, ...] = (6250, 12500, 25000, 50000)
) -> StudyResults:
    """ResNet wins on few images, ViT on many; they cross between 12,500 and 25,000."""
    generator = np.random.default_rng(4)
    cells = []
    for model, scale, exponent in (("ViT-Ti/4", 40.0, 0.48), ("R26", 4.0, 0.24)):
        for x in sizes:
            for seed in range(seeds):
                value = law(x, scale, exponent) + noise * generator.standard_normal()
                cells.append(cell(model, x, seed, float(value), "data_size"))
    return study("data_size", cells)


def ablation(seeds: int = 3, noise: float = 0.003) -> StudyResults:
    generator = np.random.default_rng(5)
    means = {"learned-1d": 0.642, "none": 0.60, "learned-2d": 0.643, "relative": 0.641}
    cells = [
        cell(name, 1.0, seed, float(mean + noise * generator.standard_normal()), "ablation")
        for name, mean in means.items()
        for seed in range(seeds)
    ]
    return study("ablation", cells)


def labels(seeds: int = 3, noise: float = 0.003) -> StudyResults:
    """Weights gain 12 points with 500 labelled images, 6 with 5,000, and nothing with 50,000."""
    generator = np.random.default_rng(6)
    scratch = {500: 0.30, 5000: 0.55, 50_000: 0.80}
    gains = {"scratch": (0.0, 0.0, 0.0), "mae": (0.05, 0.03, 0.0), "dino": (0.12, 0.06, 0.0)}
    cells = [
        cell(name, size, seed, float(mean + gain + noise * generator.standard_normal()), "labels")
        for name, of_size in gains.items()
        for (size, mean), gain in zip(scratch.items(), of_size, strict=True)
        for seed in range(seeds)
    ]
    return study("labels", cells)


def continued(seeds: int = 3, noise: float = 0.003) -> StudyResults:
    """Of 40 % on the new and 80 % on the old domain, two ways gain 10 and 5 points, and forget 20 and 2."""
    generator = np.random.default_rng(7)
    ends = {"everything": (0.5, 0.6), "layer-decay": (0.45, 0.78), "scratch": (0.3, 0.25)}
    cells = []
    for name, means in ends.items():
        for seed in range(seeds):
            new, old = (float(mean + noise * generator.standard_normal()) for mean in means)
            before = {} if name == "scratch" else {"start:top1": 0.4, "start:old_top1": 0.8}
            scores = {"top1": new, "old_top1": old, **before}
            row = cell(name, 1.0, seed, new, "continue")
            cells.append(replace(row, scores=scores, num_test=dict.fromkeys(scores, 10_000)))
    return study("continue", cells)
