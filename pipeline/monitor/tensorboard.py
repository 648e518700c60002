"""TensorBoard as a tracker: event files in `tensorboard/` of a run folder, for `tensorboard --logdir runs`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.monitor.export import Exporter, Scores
from pipeline.monitor.metrics_file import Record
from pipeline.monitor.page_folder import End
from pipeline.monitor.run_page import RunFacts


class TensorBoardExporter(Exporter):
    """Points under the names of MLflow, figures, parameters and the description."""

    name = destination = "tensorboard"

    def __init__(self, folder: Path, facts: RunFacts) -> None:
        self.folder, self.facts = folder / "tensorboard", facts
        self.title = f"TensorBoard in {self.folder}"
        self.writer: Any = None

    def connect(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # Late: takes seconds.

        self.writer = SummaryWriter(str(self.folder))
        if not self.sent.is_described:
            rows = "\n".join(f"| {name} | {value} |" for name, value in self.facts.parameters.items())
            self.writer.add_text("parameters", f"| parameter | value |\n|---|---|\n{rows}")
            self.writer.add_text("description", self.facts.description)
            self.update(is_described=True)

    def log(self, records: Sequence[Record]) -> None:
        for record in records:
            for name, value in self.facts.as_sent(record.metrics).items():
                self.writer.add_scalar(name, value, record.step, record.time / 1000)
        self.writer.flush()

    def upload(self, path: Path, name: str) -> None:
        if path.suffix == ".png":
            import numpy as np
            from PIL import Image

            with Image.open(path) as image:
                self.writer.add_image(path.stem, np.asarray(image.convert("RGB")), dataformats="HWC")

    def finish(self, end: End) -> None:
        self.writer.add_text("outcome", end.tags.get("outcome", end.status))

    def show_models(self, scores: Scores, ended: bool) -> None:
        self.writer.flush()  # The last call of a look; event files show no checkpoints.
