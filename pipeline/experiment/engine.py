"""Plans an experiment, does the runs that are not done, here, as Ray tasks, or one, and answers its question.

experiment.json  what its runs are, which a started experiment must not change. A folder holds one experiment.
RUN/             run folder of each run
output/, notes/  what the command of each run printed; its hours, and why its last try failed
progress.json    while it runs
results.parquet  what is known of each run (table.py), with results.csv, report.md, report.html and figures
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, Self

from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import DivergedError, UserError
from pipeline.base.files import as_bytes, replacing, table_csv, write_text
from pipeline.base.progress import ProgressFile, duration
from pipeline.base.words import aligned, counted, first_of
from pipeline.cluster.ray_tasks import LostError, RunJobs, run_here, shared_path
from pipeline.cluster.status_files import RESUME
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.mixture.run_data import open_run_data
from pipeline.data.storage.atomic import write_files
from pipeline.experiment.spec import RunSpec, StoppedError, row_of, run_spec, settings_of
from pipeline.experiment.table import TABLE, TO_RUN, Row, flat_rows, keep_earlier, parquet, read_table
from pipeline.monitor.export import warn
from pipeline.monitor.origin import sha256_now
from pipeline.monitor.page_folder import FIGURES
from pipeline.monitor.run_page import RunFacts, hide_passwords, split_facts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.process.outputs import hold
from pipeline.process.waits import waiting
from pipeline.settings import schema
from pipeline.settings.quantities import Limit
from pipeline.settings.run import DataConfig, TrackConfig
from pipeline.settings.schema import Fact

OUTPUT, NOTES = "output", "notes"
# Least time between two answers of an unfinished experiment, each of which draws figures.
_ANSWER_SECONDS = 60.0
# What a process costs beside training, in seconds: imports, the first step, evaluation, the last checkpoint.
_SECONDS_OF_A_PROCESS = 20.0
# How long the first run waits for its parent in MLflow, in seconds: a fresh store takes several.
_WAIT = 60.0
# Files that the MLflow page of an experiment has.
_ARTIFACTS = ("report.md", "report.html", "results.csv", "results.parquet", "results.json", "experiment.json")


@dataclass
class ExperimentAnswer:
    """metrics, summary (Markdown): for the tracker. files: of the report, and beside it; the tracker shows its figures.
    result: what `run` returns.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    summary: str = ""
    files: dict[str, bytes | str | None] = field(default_factory=dict)
    result: Any = None


@dataclass(frozen=True)
class Job:
    """The runs that one task does in turn. shared: settings of the engine. track: of its runs; None leaves it as the
    settings say.
    """

    specs: list[Any]
    shared: Any
    folder: Path
    track: TrackConfig | None = None


def jobs_of(specs: Sequence[Any]) -> list[list[Any]]:
    """Cheapest first. Together are runs that share a trunk, and a run with those that begin with its weights."""
    groups: dict[str, list[Any]] = {}
    names: dict[str, str] = {}
    for spec in specs:
        trunk = getattr(spec, "trunk", None)
        first = spec.needs[0] if len(spec.needs) == 1 and not spec.choose else ""
        names[spec.name] = names.get(first) or (trunk.name if trunk else spec.name)
        groups.setdefault(names[spec.name], []).append(spec)
    return sorted(groups.values(), key=lambda job: sum(getattr(spec, "flops", 0) for spec in job))


def run_job(job: Job) -> None:
    """Do the runs of a job that are not done. Raises as `run_spec`, but DivergedError."""
    (job.folder / OUTPUT).mkdir(parents=True, exist_ok=True)
    for spec in job.specs:
        if any("diverged" in read_note(job.folder, name) for name in spec.needs):
            continue
        begin, note = time.monotonic(), {"hours": read_note(job.folder, spec.name).get("hours") or 0.0}
        write_note(job.folder, spec.name, note)
        file = job.folder / OUTPUT / f"{spec.name}.txt"
        print(f"{spec.name} trains for {spec.config.train.length}; its output: {file}", flush=True)
        try:
            with open(file, "ab") as output:
                run_spec(spec, job.shared, output, job.track)
        except DivergedError as error:
            note["diverged"] = str(error)
        except (UserError, LostError) as error:
            write_note(job.folder, spec.name, {**note, "failed": str(error)})
            raise
        write_note(job.folder, spec.name, {**note, "hours": note["hours"] + (time.monotonic() - begin) / 3600})


def write_note(folder: Path, name: str, note: dict[str, Any]) -> None:
    (folder / NOTES).mkdir(exist_ok=True)
    write_text(folder / NOTES / f"{name}.json", json.dumps(note))


def read_note(folder: Path, name: str) -> dict[str, Any]:
    """hours, and failed or diverged with the reason. Empty if there is none, as where a kill left no time to write
    it.
    """
    return json_record.read_or_none(folder / NOTES / f"{name}.json", dict[str, Any]) or {}


def with_note(row: Row, note: dict[str, Any]) -> Row:
    """Why a run failed, or diverged before it had a folder."""
    for state in ("failed", "diverged"):
        if state in note:
            return replace(row, state=state, reason=note[state])
    return row


# -------------------------------------------------------------------- its MLflow page
def uri_of_runs(mlflow: str, track: TrackConfig, out: str) -> str:
    """Where a parent and its runs are sent to; "" for nowhere. mlflow: the parent's setting. track: of the runs, as
    their settings say.
    """
    if mlflow:
        return "" if mlflow == "none" else mlflow
    return (track.uri or default_uri(Path(out))) if track.enabled else ""


class ExperimentPage:
    """Sends a parent run, which ends when this context is left. out: folder of all runs. experiment: in MLflow, that of
    its runs.
    """

    def __init__(self, facts: RunFacts, folder: Path, out: Path, uri: str, experiment: str) -> None:
        self.folder, self.uri = folder, uri
        facts = replace(facts, artifacts=_ARTIFACTS)
        self._tracker = Tracker(TrackConfig(uri=uri, experiment=experiment), out, folder, facts)
        self._wait, self._summary = _WAIT, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._tracker.finish("FINISHED", outcome="finished", result=self._summary)
        elif isinstance(error, Exception):
            outcome = f"failed: {str(error) or type(error).__name__}"
            self._tracker.finish("FAILED", outcome=outcome, result=self._summary)
        else:  # Asked to stop, or Ctrl-C: the next start sends what is missing.
            self._tracker.finish("KILLED", in_a_hurry=True, outcome="stopped: the same command continues")

    def show(self, metrics: Mapping[str, float], summary: str, pictures: Mapping[str, Any]) -> None:
        """Send what is known by now. summary: Markdown for the description."""
        self._tracker.log(0, dict(metrics))
        write_files(self.folder / FIGURES, pictures)
        self._summary = summary

    def tracking(self, track: TrackConfig) -> TrackConfig:
        """The settings with which a run sends itself below this one, if the store answers in time."""
        if not track.enabled:
            return track
        shown = hide_passwords(self.uri)
        if not self._tracker.run_id:
            with waiting(f"MLflow at {shown} to have the run of {self.folder}", self._wait) as wait:
                while not self._tracker.run_id and wait.left > 0:
                    time.sleep(0.2)
            self._wait = 1.0  # A store that is away is not waited for again.
        if not self._tracker.run_id:
            warn(f"MLflow at {shown} has not answered: runs of {self.folder} are not shown below it.")
        return replace(track, uri=self.uri, parent_run=self._tracker.run_id or "")


# -------------------------------------------------------------------- what it is
class Experiment:
    """A list of runs and the question that their table answers. kind: as `kind` of an MLflow run. specs: what one needs
    comes before it.

    shared: what all results depend on, such as fingerprints of data and SHA-256 of weights. score: the one that is
    shown when a run ends. notes: sentences beside the plan. work: does a `job`.
    """

    kind: str
    score: str
    config: Any
    folder: Path
    specs: Sequence[Any]
    shared: Mapping[str, Any]
    notes: list[str]
    work: Any = staticmethod(run_job)

    @property
    def flops(self) -> float:
        """That all runs add."""
        return sum(spec.flops for spec in self.specs)

    def answer(self, rows: Sequence[Row]) -> ExperimentAnswer:
        raise NotImplementedError

    def facts(self) -> RunFacts:
        """What MLflow shows of it."""
        raise NotImplementedError

    def facts_on(
        self, dataset: Dataset, data: DataConfig, parameters: dict[str, Any], tags: dict[str, str], **more: Any
    ) -> RunFacts:
        """The facts of runs on a data set. data: the splits that these train on and are evaluated on."""
        name, splits = dataset.path.name, ((data.train_split, "training"), (data.eval_split, "evaluation"))
        used = tuple(split_facts(name, dataset, *of) for of in splits if of[0] in dataset.splits)
        place = {"data": dataset.fingerprint, "dataset": name, "run_folder_path": str(self.folder.resolve())}
        return RunFacts(self.config.name, self.kind, parameters, tags | place, used, **more)

    # ---------------------------------------------------------------- runs that are commands; VTAB's cells are others
    def page(self) -> ExperimentPage | None:
        """What sends it to MLflow; None if it is not sent."""
        out, track = self.config.out, self.specs[0].config.track
        uri = uri_of_runs(self.config.mlflow, track, out)
        return ExperimentPage(self.facts(), self.folder, Path(out), uri, track.experiment) if uri else None

    def job(self, specs: list[Any], page: ExperimentPage | None) -> Any:
        """The argument of `work` that does these runs."""
        track = page.tracking(specs[0].config.track) if page else None
        return Job(specs, self.config, self.folder, track)

    def ended(self, spec: Any, found: Any) -> None:
        """A run is done. found: what its job returned of it."""

    def row(self, spec: Any) -> Row:
        note, settings = read_note(self.folder, spec.name), settings_of(spec)
        row = row_of(spec, note.get("hours"))  # Without the hours of a start that was killed.
        row = replace(row, settings={name: settings.get(name) for name in self._varied})
        return row if row.state == "diverged" else with_note(row, note)

    @cached_property
    def _varied(self) -> list[str]:
        """Names of the settings by which the runs differ."""
        found = self.settings(self.specs).values()
        names = dict.fromkeys(name for one in found for name in one)
        return [name for name in names if len({str(one.get(name)) for one in found}) > 1]

    def settings(self, specs: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """The settings of runs by name, see `claim`."""
        return {spec.name: settings_of(spec) for spec in specs}

    def known_settings(self) -> Mapping[str, Fact]:
        losses = {spec.config.train.loss for spec in self.specs}
        return {name: fact for loss in losses for name, fact in objectives.facts(loss).items()}

    # ---------------------------------------------------------------- what is known
    def known(self) -> tuple[list[Any], dict[str, Row]]:
        """Returns (runs whose settings are known, rows of all by name)."""
        specs, rows = [], dict[str, Row]()
        for spec in self.specs:
            found = spec.choose(rows) if spec.choose else spec
            row = self.row(found or spec)
            if found:
                specs.append(found)
            else:
                row = replace(row, state="not run", reason="waits for others", scores={}, hours=None)
            rows[row.name] = row
        return specs, rows

    def claim(self, specs: Sequence[Any]) -> None:
        """Write experiment.json. Raises UserError with the difference if the folder holds another experiment, or other
        files.
        """
        folder, known = self.folder, self.known_settings()
        now = json.loads(json.dumps({"kind": self.kind, "shared": self.shared, "runs": self.settings(specs)}))
        then: dict[str, Any] = {"kind": self.kind, "shared": {}, "runs": {}}
        try:
            then |= json_record.read(folder / "experiment.json", dict[str, Any])
        except FileNotFoundError:
            if folder.exists() and (found := [p.name for p in folder.iterdir() if not p.name.startswith(".")]):
                raise UserError(
                    f"{folder} is not empty (it holds {found[0]}), and holds no experiment. Choose another folder."
                ) from None
        was, is_now = ({"kind": of["kind"], **of["shared"]} for of in (then, now))
        changed = list(map(str, schema.differences(is_now | was, is_now, {})))
        for name, settings in now["runs"].items():
            before = then["runs"].get(name, settings)
            changed += [f"{change} in {name}" for change in schema.differences(before, settings, known, "comparison")]
        if changed:
            raise UserError(
                f"{folder} holds another experiment: {first_of(changed, 3)}. Set it back, choose another folder, or"
                " remove this one."
            )
        both = {"kind": self.kind, "shared": now["shared"] | then["shared"], "runs": then["runs"] | now["runs"]}
        folder.mkdir(parents=True, exist_ok=True)
        if both != then:
            with replacing(folder / "experiment.json") as file:  # All jobs of an array write it, often at once.
                file.write(as_bytes(json.dumps(both, indent=1) + "\n"))


def sources_of(specs: Iterable[RunSpec]) -> dict[str, str]:
    """Splits that runs are trained and evaluated on, as a whole; weights that they begin with, and that teach them.

    Raises UserError for data that cannot be opened.
    """
    from pipeline.train.shown_facts import datasets_of  # Late: the import takes seconds.

    specs, found = list(specs), dict[str, str]()
    for run in {spec.file: spec for spec in reversed(specs)}.values():
        whole = replace(run.config.data, limit=Limit.parse("100%"), dev_share=0.0)
        for of in datasets_of(open_run_data(whole, 0, run.config.labels)):
            found[f"{of.name}:{of.split} ({of.context})"] = f"{of.digest} without {of.notes['excluded']}"
    # What begins with weights of another run of the experiment may do so before they are there.
    begun = [spec for spec in specs if not (spec.needs and spec.config.init.weights)]
    weights = {spec.config.init.weights for spec in begun} - {None}
    known = {f"the SHA-256 of {path}": sha256_now(str(path)) for path in weights}
    known |= {f"the SHA-256 of the teacher of {s.name}": objectives.teacher_digest(s.config) for s in begun}
    return found | {name: sha256 for name, sha256 in known.items() if sha256}


# -------------------------------------------------------------------- the plan
def hours_of(experiment: Experiment, rows: Mapping[str, Row]) -> dict[str, float]:
    """Hours of every run by the clock, alone: by the speed of those that are done, else by `tflops` of the settings; {}
    without either.
    """
    config, specs = experiment.config, experiment.specs
    measured: dict[str, list[float]] = {}
    for spec in specs:
        if (row := rows.get(spec.name)) and row.hours and spec.flops:
            measured.setdefault(spec.group, []).append(row.hours / spec.flops)
    if measured:
        per_flop = {group: median(values) for group, values in measured.items()}
        usual = median(per_flop.values())
        return {spec.name: spec.flops * per_flop.get(spec.group, usual) for spec in specs}
    rate = config.tflops * 1e12 * max(1, config.gpus)
    if not rate or not experiment.flops:
        return {}
    return {spec.name: (spec.flops / rate + _SECONDS_OF_A_PROCESS) / 3600 for spec in specs}


def plan_lines(experiment: Experiment, rows: Mapping[str, Row], hours: Mapping[str, float]) -> list[str]:
    """Lines of the plan: all runs with their size, length and compute, "-" where unknown; the sums; and notes."""
    table: list[tuple[str, ...]] = [("run", "images", "steps", "exaFLOPs", "state")]
    for name, row in rows.items():
        numbers = {",": row.data_size, ",d": row.steps, ".3g": row.exaflops}
        table.append((name, *(format(value, look) if value else "-" for look, value in numbers.items()), row.state))
    left = [hours[name] for name, row in rows.items() if row.state in TO_RUN and name in hours]
    done = sum(row.state == "done" for row in rows.values())
    summary = f"{counted(len(rows), 'run')}, {done} of them done; {experiment.flops / 1e18:.3g} exaFLOPs are computed"
    if left:
        summary += f"; those left take {duration(3600 * sum(left))}, one after the other"
        gpus = experiment.config.gpus
        summary += f", {sum(left) * gpus:,.3g} GPU hours" if gpus else ""
    return [*aligned(table, 1), f"{summary}.", *experiment.notes]


# -------------------------------------------------------------------- the engine
def start(make: Callable[[Any], Experiment], config: Any, run_jobs: RunJobs | None) -> Any:
    """Do what the settings of a study or a grid ask for: a plan, one run, or all. Returns as `run`, else None.

    run_jobs: where runs are done; by default as config.on says.
    """
    folder = Path(str(shared_path("out", config.out))) / config.name
    if not (config.plan or config.cell):
        hold(folder)
    experiment = make(config)
    if config.cell:
        run_one(experiment, config.cell)
        return None
    _, rows = experiment.known()
    if not config.report:
        print("\n".join(plan_lines(experiment, rows, hours_of(experiment, rows))), flush=True)
    if config.plan:
        return None
    if not run_jobs and config.on == "ray" and not config.report:
        run_jobs = on_ray(config.threads, config.gpus, config.num_tasks)
        if config.gpus and not run_jobs.keywords["num_gpus"]:  # type: ignore[attr-defined]
            raise UserError(f"gpus = {config.gpus}, but this Ray cluster has no GPU. Use gpus=0 to train on CPUs.")
    return run(experiment, run_jobs or run_here, config.report)


def run(experiment: Experiment, run_jobs: RunJobs, only_report: bool = False) -> Any:
    """Do what is not done, in the experiment's folder, locked by the caller, and write its table and report. Returns
    `ExperimentAnswer.result`.

    Raises UserError for another experiment in this folder, and at the end if a run failed; the report is written then.
    Exits with code 75 when a run was asked to stop.
    """
    specs, rows = experiment.known()
    experiment.claim(specs)
    for row in rows.values():
        if row.state == "damaged":
            print(f"{row.name}: {row.reason}{'' if only_report else ' It runs again.'}", flush=True)
    with experiment.page() or nullcontext() as page:
        try:
            if not only_report:
                _run_all(experiment, run_jobs, page)
        except StoppedError as stopped:
            _exit_to_resume(stopped)
        answer, rows = _answer(experiment, page)
        print(answer.summary, flush=True)
        if "report.md" in answer.files:
            print(f"report: {experiment.folder / 'report.md'}, report.html", flush=True)
        if failed := [row for row in rows.values() if row.state == "failed"]:
            raise UserError(
                f"{len(failed)} of {counted(len(rows), 'run')} failed, such as {failed[0].name}: {failed[0].reason} The"
                " same command tries them again; the results have all others."
            )
    return answer.result


def run_one(experiment: Experiment, name: str) -> None:
    """Do one run, as a task of a SLURM array. Those that share its first steps, or that it needs, come first."""
    specs, rows = experiment.known()
    experiment.claim(specs)
    job = next((job for job in jobs_of(specs) if any(spec.name == name for spec in job)), [])
    if not job:
        why = "waits for others: ask again when they have ended" if name in rows else "does not exist"
        raise UserError(f"cell = {name}: this run {why}. There are: {', '.join(rows)}.")
    try:
        run_job(Job(job[: [spec.name for spec in job].index(name) + 1], experiment.config, experiment.folder))
    except LostError as error:
        raise UserError(f"{error} The same command continues it.") from None
    except StoppedError as stopped:
        _exit_to_resume(stopped)


def on_ray(threads: int, gpus: float, num_tasks: int) -> RunJobs:
    """Returns what runs jobs on the Ray cluster, or on this machine if there is none."""
    from pipeline.cluster import ray_tasks

    ray_tasks.connect()
    fitting, num_gpus = ray_tasks.capacity(threads, gpus)
    return partial(ray_tasks.run_tasks, limit=num_tasks or fitting, num_cpus=threads, num_gpus=num_gpus)


def _run_all(experiment: Experiment, run_jobs: RunJobs, page: ExperimentPage | None) -> None:
    begun, next_answer, jobs = set[str](), time.monotonic(), list[list[Any]]()

    def fail(index: int, reason: str) -> None:
        spec = next(spec for spec in jobs[index] if experiment.row(spec).state in TO_RUN)
        write_note(experiment.folder, spec.name, {**read_note(experiment.folder, spec.name), "failed": reason})
        progress.ended(experiment.row(spec), experiment.score)

    with RunsProgress(experiment.folder, list(experiment.known()[1].values())) as progress:
        while True:
            specs, rows = experiment.known()
            states = {name: row.state for name, row in rows.items()}
            left = [spec for spec in specs if states[spec.name] in TO_RUN]
            todo = {spec.name for spec in left if "diverged" not in map(states.get, spec.needs)} - begun
            if not todo:
                return
            begun |= todo
            experiment.claim(specs)
            jobs = [job for job in jobs_of(specs) if any(spec.name in todo for spec in job)]
            given = (experiment.job(job, page) for job in jobs)
            for index, found in run_jobs(experiment.work, given, progress.retried, fail):
                for spec in jobs[index]:
                    if spec.name in todo:
                        experiment.ended(spec, found)
                        progress.ended(experiment.row(spec), experiment.score)
                if time.monotonic() >= next_answer:
                    _answer(experiment, page)
                    next_answer = time.monotonic() + _ANSWER_SECONDS


def _answer(experiment: Experiment, page: ExperimentPage | None) -> tuple[ExperimentAnswer, dict[str, Row]]:
    """Write the table and the report of what is done by now. Returns (the answer, the rows as they are now)."""
    rows = experiment.known()[1]
    earlier = read_table(experiment.folder)
    table = keep_earlier(list(rows.values()), earlier)
    answer = experiment.answer(table)
    write_answer(answer, table, earlier, experiment.folder)
    if page:
        page.show(answer.metrics, answer.summary, {n: png for n, png in answer.files.items() if n.endswith(".png")})
    return answer, rows


def write_answer(answer: ExperimentAnswer, table: Sequence[Row], earlier: Sequence[Row], folder: Path) -> None:
    """All files appear together, and the one by which a folder is known last. Pictures of an older report are
    removed.
    """
    files: dict[str, bytes | str | None] = dict.fromkeys(file.name for file in folder.glob("*.png"))
    files |= {**answer.files, TABLE: parquet(table, earlier), "results.csv": table_csv(flat_rows(table))}
    write_files(folder, files, mark="results.json" if "results.json" in files else "report.html")


def _exit_to_resume(stopped: StoppedError) -> NoReturn:
    print(f"{stopped}: the same command continues (exit code {RESUME})", file=sys.stderr, flush=True)
    sys.exit(RESUME)


class RunsProgress:
    """A line for each run that ends, and progress.json. rows: of all runs, as they begin."""

    def __init__(self, folder: Path, rows: Sequence[Row]) -> None:
        self._before = sum(row.state not in TO_RUN for row in rows)
        self.counts = {"runs": len(rows), "done": self._before, "failed": 0, "retries": 0}
        self._file, self._begin = ProgressFile(folder), time.monotonic()

    def __enter__(self) -> Self:
        self._write()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.remove()

    def ended(self, row: Row, score: str) -> None:
        """A run is done, or is not tried again."""
        self.counts["done" if row.state == "done" else "failed"] += 1
        left = self._write()
        shown = f" {score} {row.scores[score]:.2%}," if score in row.scores else ""
        line = f"{row.name}:{shown} {duration(3600 * (row.hours or 0.0))}"
        if row.state != "done":
            line = f"{row.state.upper()}: {row.name}: {row.reason}"
        failed = f", {self.counts['failed']:,} failed" * bool(self.counts["failed"])
        text = f"{self.counts['done']:,} of {counted(self.counts['runs'], 'run')}{failed}"
        print(f"[{text}{f', {duration(left)} left' * bool(left)}] {line}", flush=True)

    def retried(self, reason: str) -> None:
        """A run is done again."""
        self.counts["retries"] += 1
        print(f"{reason} It is run again; retries so far: {self.counts['retries']:,}", file=sys.stderr, flush=True)
        self._write()

    def _write(self) -> float:
        """Returns the seconds left, at the average rate of this start; 0 before the first run ends."""
        ended = self.counts["done"] + self.counts["failed"]
        rate = (ended - self._before) / (time.monotonic() - self._begin + 1e-9)
        left = round((self.counts["runs"] - ended) / rate, 1) if rate else 0.0
        self._file.write(self.counts | {"seconds_left": left})
        return left
