"""Finds out what weights are at the moment when something begins with them: path, SHA-256, run, step, and what they
scored.

The last score of a run in progress will not stay that of the weights taken from it now.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipeline.base.errors import UserError
from pipeline.monitor.export import run_id_of, tracked_folder_of
from pipeline.monitor.metrics_file import METRICS_FILE, by_name, read_metrics
from pipeline.monitor.page_folder import RUN_FILE, PageFolder
from pipeline.monitor.run_page import WeightsOrigin
from pipeline.process.committed import GONE, NAME, read_checksums


def find_origin(file: Path, named: str) -> WeightsOrigin:
    """Identify a weights file. named: as in the command, such as its run. Hashes it unless a checkpoint has its hash.

    Raises OSError, and UserError for a file that is gone.
    """
    made_by = _made_by(file)
    is_checkpoint = NAME.fullmatch(file.parent.name)
    step = int(is_checkpoint[1]) if is_checkpoint else made_by.get("step")
    folder = _run_folder(file, Path(named))
    run_id = run_id_of(folder) if folder else None
    name, score = _described_by_its_run(folder, step) if folder else (made_by.get("run", ""), "")
    try:
        sha256 = _sha256(file)
    except FileNotFoundError:
        raise UserError(f"{file}: {GONE}, or run the same command again.") from None
    return WeightsOrigin(str(file), sha256, name, run_id or "", step, score)


def sha256_now(named: str) -> str:
    """Current SHA-256 of these weights, as in `find_origin`; "" for weights in MLflow and unreadable files."""
    from pipeline.model.files import find_file  # Late: imports torch.

    with contextlib.suppress(UserError, OSError):
        return _sha256(find_file(Path(named)))
    return ""


def _made_by(file: Path) -> dict[str, Any]:
    """Metadata of a weights file of this pipeline: its run's name ("run") and the step."""
    from pipeline.model.weights import METADATA  # Late: imports torch.

    # `load` says what is wrong with a file.
    with (
        contextlib.suppress(OSError, SafetensorError, ValueError, KeyError),
        safe_open(file, framework="np") as tensors,
    ):
        found: dict[str, Any] = json.loads((tensors.metadata() or {})[METADATA])["extra"]
        return found
    return {}


def _sha256(file: Path) -> str:
    checksums = read_checksums(file.parent) or {}
    if file.name in checksums:
        return checksums[file.name].sha256
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _run_folder(file: Path, named: Path) -> Path | None:
    """The folder of the run that made a weights file, which may lie in another one (checkpoint.folder); None for other
    weights.
    """
    beside = (folder for folder in (named, *file.absolute().parents[:3]) if (folder / RUN_FILE).exists())
    return next(beside, None) or tracked_folder_of(str(file))


def _described_by_its_run(folder: Path, step: int | None) -> tuple[str, str]:
    """(name of the run, its score at a step in words, or at the last evaluation before it; "" if there was none)."""
    try:
        facts = PageFolder(folder).read_facts().facts
        records, _ = read_metrics(folder / METRICS_FILE)
    except (UserError, OSError):
        return folder.name, ""
    points = by_name(records)
    scored = facts.score_among(points.keys())
    steps = [at for at in points.get(scored, {}) if step is None or at <= step]
    if not steps:
        return facts.name, ""
    last = max(steps)
    words = facts.score_in_words(scored, points[scored][last])
    return facts.name, words if last == step else f"{words} at step {last:,}"
