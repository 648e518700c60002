"""What the rows of `bench.py gpu` say: which configurations are exact, which is the fastest, and the tables."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from data_tools.bench.apart import Row
from data_tools.bench.gpu.gpu_step import Case, Setup
from data_tools.bench.record import BenchRecord, markdown
from pipeline.base.words import counted
from pipeline.model import training_flops_per_image
from pipeline.monitor.gpus import find_gpu


@dataclass(frozen=True)
class Fastest:
    """The fastest exact training step of a model that was measured, optimizer included.

    model: as ViT-L/16@224. gflops: of training on an image. settings: those of a run that give it. This is the form in bench.json.
    """

    model: str
    gflops: float
    batch: int
    images_per_second: float
    settings: list[str]


@dataclass(frozen=True)
class Exactness:
    """Exact: each of the first losses within `tolerance` of the plain step's (relative), by kernels that are deterministic."""

    tolerance: float

    def difference(self, rows: Sequence[Row], row: Row) -> float | None:
        """Largest relative difference to the losses of the plain step with the same model and batch; None without one."""
        plain = _find(rows, row["model"], row["batch"], Setup())
        reference = row["losses"] if plain is None and Setup(**row["setup"]) == Setup() else plain and plain["losses"]
        if not reference:
            return None
        return max(abs(a - b) / abs(b) for a, b in zip(row["losses"], reference, strict=True))

    def has_equal_loss(self, row: Row) -> bool:
        difference = row.get("loss_difference")
        return difference is not None and difference <= self.tolerance

    def fastest(self, rows: Sequence[Row], case: Case) -> Setup | None:
        """The fastest exact configuration of the engine."""
        exact = [
            row
            for row in _of_case(rows, case.name, case.batch)
            if (setup := Setup(**row["setup"])).engine and setup.deterministic and self.has_equal_loss(row)
        ]
        return Setup(**min(exact, key=lambda row: row["ms"])["setup"]) if exact else None

    def milliseconds(self, rows: Sequence[Row], case: Case, setup: Setup) -> float | None:
        row = _find(rows, case.name, case.batch, setup)
        return row["ms"] if row else None


def _of_case(rows: Iterable[Row], model: str, batch: int) -> list[Row]:
    return [row for row in rows if "losses" in row and (row["model"], row["batch"]) == (model, batch)]


def _find(rows: Iterable[Row], model: str, batch: int, setup: Setup) -> Row | None:
    return next((row for row in _of_case(rows, model, batch) if Setup(**row["setup"]) == setup), None)


def write_report(record: BenchRecord, exactness: Exactness) -> None:
    """Print the tables in Markdown, and the settings to use; both also become part of the record."""
    machine, rows = record.facts["machine"], record.rows
    device = f"{machine['gpu']}" if machine["gpu"] != "none" else machine["cpu"]
    product = next((row["tflops"] for row in rows if "side" in row), 0.0)
    gpu = find_gpu(device)
    peak = f"data sheet {gpu.tflops:,.0f} TFLOP/s" if gpu else "no data sheet"
    lines = [
        f"{device}, {counted(machine['cores'], 'core')}, torch {machine['torch']}, {record.facts['date']}: `{record.facts['command']}`",
        f"bf16; plain matrix product {f'{product:,.1f} TFLOP/s' if product else 'not measured'}, {peak}.",
        _steps(rows, exactness, gpu.tflops if gpu else 0.0, product),
        _shards(rows), _objectives(rows, gpu.tflops if gpu else 0.0), _fits(rows),
    ]  # fmt: skip
    advice = _advice(rows, exactness)
    record.facts |= {"report": "\n\n".join(line for line in [*lines, *advice] if line), "advice": advice}
    record.facts["fastest"] = [asdict(found) for found in fastest_steps(rows, exactness)]
    print("\n" + record.facts["report"], flush=True)


def _table(rows: Sequence[Row], part: str, heads: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> str:
    """Markdown of the rows whose names begin with a part's word. cells: those of a row after its name; one that failed has its reason."""
    lines = []
    for row in rows:
        if row["name"].partition(" ")[0] == part:
            of_row = [f"failed: {row['failed']}", *[""] * (len(heads) - 2)] if "failed" in row else cells(row)
            lines.append([row["name"].removeprefix(f"{part} "), *of_row])
    return markdown(heads, lines)


def _steps(rows: Sequence[Row], exactness: Exactness, sheet: float, product: float) -> str:
    def cells(row: Row) -> list[str]:
        difference = row["loss_difference"]
        return [
            *_speed(row), f"{row['tflops']:,.1f}",
            f"{row['tflops'] / sheet:.1%}" if sheet else "", f"{row['tflops'] / product:.1%}" if product else "",
            f"{row['peak_memory_gib']:.1f}",
            ("" if difference is None else f"{difference:.1e}") + ("" if exactness.has_equal_loss(row) else " NO"),
        ]  # fmt: skip

    heads = ["step", "ms", "images/s", "TFLOP/s", "MFU, data sheet", "of the product", "peak GiB", "loss within"]  # fmt: skip
    return _table(rows, "step", heads, cells)


def _speed(row: Row) -> tuple[str, str]:
    return f"{row['ms']:,.1f}", f"{row['images_per_second']:,.0f}"


def _cases(rows: Sequence[Row]) -> list[Case]:
    """The models and batches of which a step was measured."""
    return [_case(*key) for key in {(row["model"], row["batch"]): None for row in rows if "losses" in row}]


def _case(model: str, batch: int) -> Case:
    """The case of a row's model, "ViT-L/16@224"."""
    name, _, pixels = model.partition("@")
    return Case(name, int(pixels), batch, 0.0)


def _shards(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["name"].startswith("shards") and ("failed" in row or "data_wait" in row)]
    heads = ["from shards", "images/s", "MFU", "data wait", "checkpoint stall", "of a minute", "peak GiB"]
    rates = [row["images_per_second"] for row in found if "failed" not in row]
    cost = f"\n\nA log line every step costs {1 - rates[1] / rates[0]:+.2%} of the speed." if len(rates) == 2 else ""
    return _table(found, "shards", heads, lambda row: [
        f"{row['images_per_second']:,.0f}", f"{row['mfu']:.1%}", f"{row['data_wait']:.2%}",
        f"{row['checkpoint_blocked_seconds']:.3f} s", f"{row['checkpoint_share_at_one_a_minute']:.2%}", f"{row['peak_memory_gib']:.1f}",
    ]) + cost  # fmt: skip


def _objectives(rows: Sequence[Row], sheet: float) -> str:
    heads = ["engine's step of", "batch", "ms", "images/s", "TFLOP/s", "MFU, data sheet", "arithmetic of classification", "peak GiB", "predicted"]  # fmt: skip
    return _table(rows, "objectives", heads, lambda row: [
        f"{row['batch']}", *_speed(row), f"{row['tflops']:,.1f}", f"{row['tflops'] / sheet:.1%}" if sheet else "",
        f"{row['arithmetic']:.2f}", f"{row['peak_memory_gib']:.1f}", f"{row['predicted_gib']:.1f}",
    ])  # fmt: skip


def _fits(rows: Sequence[Row]) -> str:
    def cells(row: Row) -> tuple[str, str]:
        if "fits" in row:
            return f"{row['fits']}", f"{row['peak_memory_gib']:.1f}"
        return f"{row['too_large']} does not fit", ""

    return _table(rows, "fit", ["engine, eager, ZeRO stage 1", "micro-batch", "peak GiB"], cells)


def _advice(rows: Sequence[Row], exactness: Exactness) -> list[str]:
    """Lines that name the fastest exact configuration of each model, as the settings of a run that give it."""
    lines = []
    for case in _cases(rows):
        best = exactness.fastest(rows, case)
        settings = " ".join(_settings(best, case.batch)) if best else "none measured"
        lines.append(f"{case.name}, batch {case.batch}: fastest exact step of the engine: {settings}.")
    return lines


def fastest_steps(rows: Sequence[Row], exactness: Exactness) -> list[Fastest]:
    """The fastest exact configuration of each model and batch; its images/s are `measured` of launch/plan.py."""
    found = []
    for case in _cases(rows):
        setup = exactness.fastest(rows, case)
        row = setup and _find(rows, case.name, case.batch, setup)
        if setup and row:
            gflops = training_flops_per_image(case.config) / 1e9
            found.append(Fastest(case.name, gflops, case.batch, row["images_per_second"], _settings(setup, case.batch)))
    return found


def _settings(setup: Setup, batch: int) -> list[str]:
    """The settings of a run that give this step of the engine."""
    chosen = ("compile", "fused", "deterministic")
    return [*(f"engine.{name}={str(getattr(setup, name)).lower()}" for name in chosen), f"train.micro_batch={batch}"]
