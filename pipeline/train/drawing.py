"""Draws the figures of a run at evaluations, in a process of low priority, and at its end, which waits for the last
drawing.

Rank 0 only. The process reads the run folder, so it needs nothing of this one. Which module draws is up to the command
that starts the run: reports use the same figures, and their rooms are above this one.
"""

import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np

from pipeline.base.files import replacing
from pipeline.data.dataset.split import Split
from pipeline.evaluate.classify import Predictions, outcomes
from pipeline.evaluate.regression import TargetPredictions
from pipeline.monitor.page_folder import LOG, PAGE
from pipeline.process.launcher import VARIABLES
from pipeline.process.start import child_environment
from pipeline.process.waits import waiting

# At most this many images are kept, the first ones of the split.
_MAX_IMAGES = 50_000


class DrawingProcess:
    """The drawing process of a run, `python -m MODULE RUN_FOLDER`, at the end with --final.

    timeout: seconds that the end of a run waits for the last one.
    """

    def __init__(self, folder: Path, module: str, timeout: float = 60.0) -> None:
        self.folder, self.timeout = folder.resolve(), timeout
        # -P: of this code, whatever the working folder holds; paths in the settings are relative to that folder.
        self.command = (sys.executable, "-P", "-m", module, str(self.folder))
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, predictions: Predictions | TargetPredictions | None, split: Split | None) -> None:
        """Keep the predictions of an evaluation, and draw, unless a drawing is in progress."""
        with contextlib.suppress(OSError):  # A full disk, which the next checkpoint reports.
            if predictions is not None and split is not None:
                self._keep(predictions, split)
            if self._process is None or self._process.poll() is not None:
                self._process = self._start(("nice", "-n", "19", *self.command))

    def end(self, last: bool) -> None:
        """End a drawing in progress. last: draw once more, with the figures that need the weights."""
        self._kill()
        if last:
            # At the priority of the run, which waits for it: at a lower one, other programs of the host would hold up
            # its end.
            with contextlib.suppress(OSError, subprocess.TimeoutExpired), waiting("the last figures", self.timeout):
                self._process = self._start((*self.command, "--final"))
                self._process.wait(self.timeout)
            self._kill()

    def _keep(self, predictions: Predictions | TargetPredictions, split: Split) -> None:
        num = min(len(split), _MAX_IMAGES)
        arrays = {"rows": np.arange(num)}
        if isinstance(predictions, TargetPredictions):
            values = np.where(predictions.readable[:, None], predictions.values, np.nan)
            arrays |= {"targets": predictions.targets, "values": values}
        else:
            true, predicted = outcomes(predictions, split)
            arrays |= {"true": true, "predicted": predicted, "of_label": predictions.of_label}
            arrays["probability"] = predictions.probabilities[:, 0]
        if split.groups is not None:
            arrays["groups"] = split.groups
        (self.folder / PAGE).mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / PAGE / "predictions.npz") as file:
            np.savez_compressed(file, allow_pickle=False, **{name: array[:num] for name, array in arrays.items()})

    def _start(self, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
        # It is not a rank.
        environment = {name: value for name, value in child_environment().items() if name not in VARIABLES}
        with open(self.folder / PAGE / LOG, "ab") as log:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # No-op once it has ended.
            self._process.wait()
