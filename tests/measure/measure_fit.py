"""How often the bootstrap intervals of a study's laws contain the truth: `python tests/measure/measure_fit.py [draws]`.

Synthetic families with known laws. Columns: share of draws whose 95 % interval contains the floor, the exponent, the
law at the next larger size, and a new run there; the median width of the last as a share of the fall of the error; the
share of fits that say something.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.experiment.law import fit_power_laws

LAWS = {"flat floor": (0.2, 0.5, 0.8), "usual": (0.1, 0.6, 0.4), "no floor": (0.0, 0.7, 0.2)}


@dataclass(frozen=True)
class Design:
    """Sizes are 1, step, step**2, ... seed_noise, cell_noise: standard deviations."""

    num_sizes: int
    num_seeds: int
    seed_noise: float = 0.005
    cell_noise: float = 0.0
    step: float = 3.0


def coverage(design: Design, law: tuple[float, float, float], draws: int) -> np.ndarray:
    """The six columns."""
    rng = np.random.default_rng([draws, design.num_sizes, design.num_seeds])
    sizes = design.step ** np.arange(design.num_sizes + 1)
    fall = law[1] * (1 - sizes[-2] ** -law[2]) or 1.0
    rows = []
    for draw in range(draws):
        x = np.append(np.repeat(sizes[:-1], design.num_seeds), sizes[-1])
        cell = rng.normal(0, design.cell_noise, len(sizes))[np.searchsorted(sizes, x)]
        true = law[0] + law[1] * x ** -law[2]
        errors = np.clip(true + cell + rng.normal(0, design.seed_noise, len(x)), 0, 1)
        fit = fit_power_laws({"": (x[:-1], errors[:-1])}, draw)[""]
        _, low, high = fit.curve(x[-1:])
        new = fit.expected(float(x[-1]))
        inside = [
            fit.floor.low <= law[0] <= fit.floor.high,
            fit.exponent.low <= law[2] <= fit.exponent.high,
            low[0] <= true[-1] <= high[0],
            new.low <= errors[-1] <= new.high,
        ]
        rows.append([*inside, (new.high - new.low) / fall, not fit.why_not])
    table = np.array(rows, dtype=float)
    return np.concatenate([table[:, :4].mean(0), np.median(table[:, 4:5], 0), table[:, 5:].mean(0)])


def main(draws: int) -> None:
    print("                                  seeds cells   floor expon law   new   width says")
    designs = [(sizes, seeds) for sizes in (4, 5, 8) for seeds in (1, 2, 3)]
    for name, law in {**LAWS, "noise only": (0.5, 0.0, 0.5)}.items():
        for sizes, seeds in designs:
            for noise, cells in ((0.003, 0.0), (0.01, 0.0), *([(0.004, 0.004)] if seeds > 1 else [])):
                design = Design(sizes, seeds, noise, cells, 2.0 if sizes == 8 else 3.0)
                values = " ".join(f"{value:.3f}" for value in coverage(design, law, draws))
                print(f"{name:24} {sizes} x {seeds}  noise {noise:.3f} {cells:.3f}   {values}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
