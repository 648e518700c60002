"""What a started experiment must not change: the content of experiment.json. Runs may be added."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import as_bytes, replacing
from pipeline.data.mixture.run_data import open_run_data
from pipeline.experiment.spec import RunSpec
from pipeline.monitor.origin import sha256_now
from pipeline.settings import schema
from pipeline.settings.quantities import Limit
from pipeline.settings.schema import Fact

FILE = "experiment.json"


def claim(
    folder: Path, kind: str, shared: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]], known: Mapping[str, Fact]
) -> None:
    """Write experiment.json. Raises UserError with the difference if the folder holds another experiment, or other
    files.

    shared: what all results depend on, such as fingerprints of data and SHA-256 of weights. runs: name -> settings that
    its result depends on. known: what is known of the settings.
    """
    file, now = folder / FILE, json.loads(json.dumps({"kind": kind, "shared": shared, "runs": runs}))
    then: dict[str, Any] = {"kind": kind, "shared": {}, "runs": {}}
    try:
        then |= json_record.read(file, dict[str, Any])
    except FileNotFoundError:
        if folder.exists() and (found := [p.name for p in folder.iterdir() if not p.name.startswith(".")]):
            raise UserError(
                f"{folder} is not empty (it holds {found[0]}), and holds no experiment. Choose another folder."
            ) from None
    before_of = {"kind": then["kind"], **then["shared"]}
    pairs = [(name, before_of.get(name, of), of) for name, of in {"kind": kind, **now["shared"]}.items()]
    changed = [f"{name} was {before}, is {of}" for name, before, of in pairs if before != of]
    for name, settings in now["runs"].items():
        before = then["runs"].get(name, settings)
        changed += [f"{change} in {name}" for change in schema.differences(before, settings, known, "comparison")]
    if changed:
        more = f" and {len(changed) - 3} others" if len(changed) > 3 else ""
        raise UserError(
            f"{folder} holds another experiment: {'; '.join(changed[:3])}{more}. Set it back, choose another folder, or"
            " remove this one."
        )
    both = {"kind": kind, "shared": now["shared"] | then["shared"], "runs": then["runs"] | now["runs"]}
    folder.mkdir(parents=True, exist_ok=True)
    if both != then:
        with replacing(file) as replacement:  # All jobs of an array write it, often at the same moment.
            replacement.write(as_bytes(json.dumps(both, indent=1) + "\n"))


def sources_of(specs: Iterable[RunSpec]) -> dict[str, str]:
    """Splits that runs are trained and evaluated on, as a whole; weights that they begin with, and that teach them.

    Raises UserError for data that cannot be opened.
    """
    from pipeline.train.shown_facts import datasets_of  # Late: the import takes seconds.

    specs, found = list(specs), dict[str, str]()
    for run in {spec.file: spec for spec in reversed(specs)}.values():
        whole = replace(run.config.data, limit=Limit.parse("100%"), dev_share=0.0)
        for of in datasets_of(open_run_data(whole, 0, run.config.train.global_batch, run.config.labels)):
            found[f"{of.name}:{of.split} ({of.context})"] = f"{of.digest} without {of.notes['excluded']}"
    weights = {spec.config.init.weights for spec in specs if not spec.needs} - {None}
    known = {f"the SHA-256 of {path}": sha256_now(str(path)) for path in weights}
    known |= {f"the SHA-256 of the teacher of {s.name}": objectives.teacher_digest(s.config) for s in specs}
    return found | {name: sha256 for name, sha256 in known.items() if sha256}
