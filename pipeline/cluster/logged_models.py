"""The checkpoints of a run that MLflow shows as logged models: kept ones, the best one, and the last one of a run that
has ended.
"""

from pipeline.checkpoint.store import MODEL, Checkpoints, step_of
from pipeline.monitor.run_page import ModelFacts
from pipeline.process.committed import read_checksums


def logged_models(checkpoints: Checkpoints, ended: bool) -> list[ModelFacts]:
    """The logged models of a run, oldest first; while it goes on, without checkpoints that later steps will remove."""
    kept = checkpoints.kept()
    found = checkpoints.candidates()
    newest = found[0].name if found and ended else None
    models = []
    for path in reversed(found):
        roles = {"kept": path.name in kept.always, "best": path.name == kept.best, "last": path.name == newest}
        named = tuple(role for role, has in roles.items() if has)
        checksums = read_checksums(path) if named else None
        if checksums and MODEL in checksums:
            models.append(ModelFacts(step_of(path), str(path), checksums[MODEL].sha256, named))
    return models
