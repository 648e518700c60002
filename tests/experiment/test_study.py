"""The cells of a study: which runs it consists of, what they cost, and what is refused before anything starts."""

import json
import re
import shutil
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from ranks import ROOT
from tiny_study import write_run

from pipeline.base.errors import UserError
from pipeline.cluster.status_files import write_settings
from pipeline.data.dataset.exclusion import EXCLUDED, write_list
from pipeline.data.dataset.manifest import open_dataset
from pipeline.experiment import study as studies
from pipeline.experiment.engine import hours_of, jobs_of, run_one
from pipeline.experiment.spec import make_spec
from pipeline.experiment.study import Study, compute_of_runs, pretraining_compute
from pipeline.model import create, save
from pipeline.monitor.page_folder import PageFolder, Start
from pipeline.monitor.run_page import RunFacts, WeightsOrigin
from pipeline.settings import schema
from pipeline.settings.commands.study import StudyConfig


@pytest.fixture
def base(dataset: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path, dataset)


def make(base: Path, text: str, *overrides: str) -> StudyConfig:
    file = base.with_name("study.yaml")
    file.write_text(text)
    return schema.load(StudyConfig, file, [f"run={base}", f"out={base.parent / 'runs'}", *overrides])


SIZES = """
name: sizes
question: data_size
models: [{name: wide, settings: [model.width=32]}, {name: slim}]
data_sizes: [50, 100%]
seeds: [0, 1]
"""
SCALING = """
name: scaling
question: scaling
models: [{name: wide, settings: [model.width=32]}, {name: slim}]
budgets: [1.0e-9, 2.0e-9]
"""


def claim(study: Study) -> None:
    study.claim(study.specs)


def names(study: Study) -> list[str]:
    return [cell.name for cell in study.cells]


def test_each_combination_is_a_cell(base: Path) -> None:
    study = Study(make(base, SIZES))
    assert len(study.cells) == len(set(names(study))) == 2 * 2 * 2
    assert {cell.facts["data_size"] for cell in study.cells} == {50, 150}
    assert {(cell.seed, cell.config.data.limit.count(150)) for cell in study.cells} == {
        (seed, size) for seed in (0, 1) for size in (50, 150)
    }
    assert [cell.flops for cell in study.cells] == sorted(cell.flops for cell in study.cells), "cheapest first"
    wide = next(cell for cell in study.cells if cell.name == "wide-n50-seed1")
    assert wide.config.model.width == 32
    assert wide.folder == base.parent / "runs" / "sizes" / "wide-n50-seed1"
    assert wide.facts["images_seen"] == 8 * 24


def test_budgets_are_the_same_compute_for_each_model(base: Path) -> None:
    study = Study(make(base, SCALING))
    by_name = {cell.name: cell for cell in study.cells}
    assert set(by_name) == {"wide-1e-09EF-seed0", "wide-2e-09EF-seed0", "slim-1e-09EF-seed0", "slim-2e-09EF-seed0"}
    for name, cell in by_name.items():
        budget = float(name.split("-")[1] + "-" + name.split("-")[2].removesuffix("EF"))
        a_step = cell.flops / cell.facts["steps"]
        assert abs(cell.flops - budget * 1e18) <= a_step / 2
    assert by_name["slim-1e-09EF-seed0"].flops == pytest.approx(by_name["wide-1e-09EF-seed0"].flops, rel=0.2)


def test_models_may_have_lengths_of_their_own_instead(base: Path) -> None:
    models = "[{name: wide, settings: [model.width=32,train.length=10 steps]}, {name: slim}]"
    ablation = "name: a\nquestion: ablation\nmodels: " + models + "\nsettings: [train.length=20 steps]"
    steps = {cell.name: cell.facts["steps"] for cell in Study(make(base, ablation)).cells}
    assert steps == {"wide-seed0": 10, "slim-seed0": 20}
    with pytest.raises(UserError, match=r"model wide sets train\.length=10 steps"):
        make(base, SCALING, f"models={models}")


def test_the_examples_of_the_documentation_are_settings(tmp_path: Path) -> None:
    """The first was no YAML."""
    text = (ROOT / "docs/studies.md").read_text()
    examples = [textwrap.dedent(found) for found in re.findall(r"\n\n((?:    .*\n)+)", text) if "question: " in found]
    assert len(examples) == 2
    for example in examples:
        (tmp_path / "study.yaml").write_text(example)
        assert schema.load(StudyConfig, tmp_path / "study.yaml").models


def test_a_trunk_is_counted_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SCALING.replace("budgets: [1.0e-9, 2.0e-9]", "lengths: [10 steps, 20 steps, 40 steps]\ncooldown: 0.2")
    study = Study(make(base, text, "models=[{name: slim}]"))
    (job,) = jobs_of(study.specs)
    assert [(cell.facts["steps"], cell.trunk_steps) for cell in job] == [(10, 8), (20, 16), (40, 32)]
    assert {cell.trunk.folder for cell in job if cell.trunk} == {base.parent / "runs" / "scaling" / "slim-trunk-seed0"}
    assert [cell.config.schedule.cooldown.steps(150, 24) for cell in job] == [2, 4, 8]
    a_step = job[0].flops / 10
    assert [cell.flops / a_step for cell in job] == [10, 20 - 8, 40 - 16]
    with pytest.raises(UserError, match="cell = 99"):
        run_one(study, "99")
    ran: list[str] = []
    monkeypatch.setattr("pipeline.experiment.engine.run_spec", lambda spec, *_: ran.append(spec.name))
    run_one(study, job[1].name)
    assert ran == [job[0].name, job[1].name], "the shorter one comes first"


def test_the_plan_lists_every_cell(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make(base, SIZES, "tflops=1", "gpus=8", "plan=true")
    assert studies.run(config) is None
    said = capsys.readouterr().out
    assert all(f"\n{name} " in said for name in names(Study(config)))
    assert "8 runs, 0 of them done" in said
    assert not (base.parent / "runs").exists(), "a plan writes nothing"


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "study").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_ready_studies_have_cells(file: Path, dataset: Path, tmp_path: Path) -> None:
    """On a small data set, which is why batches and subsets are small."""
    own = schema.load(StudyConfig, file)
    small = [
        f"data.path={dataset}",
        "data.eval_split=val",
        "train.global_batch=64",
        "train.micro_batch=64",
        "schedule.warmup=1 steps",
        *["objective.local_views=0"] * (file.stem == "continue"),  # Their size is of patches of 14 pixels.
    ]
    sizes = (
        [f"data_sizes=[{','.join(str(20 * (i + 1)) for i in range(len(own.data_sizes)))}]"] if own.data_sizes else []
    )
    settings = f"settings={json.dumps([*own.settings, *small])}"
    finetunes = []
    for name in own.finetune:  # On the same small data.
        content = yaml.safe_load((ROOT / name).read_text())
        finetunes.append(tmp_path / Path(name).name)
        finetunes[-1].write_text(yaml.safe_dump({**content, "data": {"path": str(dataset), "eval_split": "val"}}))
    models = [
        {
            **vars(model),
            "settings": [
                re.sub(r"\{path: datasets/\w+", f"{{path: {dataset}, split: val", text)
                for text in model.settings
                if not text.startswith("schedule.warmup=")
            ],
            "weights": str(tmp_path / f"{model.name}.pt") if model.weights else "",
        }
        for model in own.models
    ]
    for model in models:
        if model["weights"]:
            save(create("ViT-mu/4", 32, 0, depth=5), model["weights"])
    more = [
        settings,
        *sizes,
        f"models={json.dumps(models)}",
        f"finetune=[{','.join(map(str, finetunes))}]",
        f"out={tmp_path}",
        "tflops=1",
    ]
    study = Study(schema.load(StudyConfig, file, more))
    lengths = max(1, len(own.lengths), len(own.budgets))
    assert len(study.cells) == len(own.models) * max(1, len(own.data_sizes)) * lengths * len(own.seeds)
    assert sum(hours_of(study, {}).values()) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data_sizes=[50,151]", "only|150"),
        ("lengths=[8 steps,9 steps]", "belong to question = scaling"),
        ("models=[{name: a},{name: b,weights: runs/b}]", "weights.*question = labels"),
        ("question=labels", "question = labels compares weights with the first model: give at least two models"),
        (
            "models=[{name: a},{name: b,settings: [data.path=elsewhere]}]",
            "model b sets data.path=elsewhere, which must be the same",
        ),
        (["question=continue", "data_sizes=[]"], "question = continue needs a model with weights"),
        (
            ["question=continue", "data_sizes=[]", "models=[{name: a,weights: runs/b}]"],
            "score = top1: question = continue compares probes",
        ),
        ("models=[{name: a},{name: a}]", "models has two called 'a'"),
        ("score=5shot", "score = 5shot: these cells will not have it, but top1\\."),
        ("cooldown=0.5", "cooldown = 0.5 .* lengths or budgets"),
        (
            "settings=[schedule.warmup=9 steps]",
            "cell wide-n50-seed0: schedule.warmup = 9 steps ",
        ),
        ("models=[{name: a},{name: b,settings: [train.loss=masked_mean_color]}]", "train.loss"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(base: Path, change: str | list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        Study(make(base, SIZES, *([change] if isinstance(change, str) else change)))
    assert re.search(message, str(refused.value)), str(refused.value)
    assert not (base.parent / "runs").exists()


def test_a_started_study_may_grow_but_not_change(base: Path) -> None:
    claim(Study(make(base, SIZES, "seeds=[0]")))
    grown = Study(make(base, SIZES))
    claim(grown)
    claim(Study(make(base, SIZES, "seeds=[0]", "settings=[data.threads=2,train.stop_after_minutes=60]")))
    for change, message in (
        ("settings=[optimizer.lr=0.5]", "optimizer.lr was 0.001, is 0.5 in slim-n50-seed0"),
        (
            "models=[{name: wide, settings: [model.width=48]}]",
            "model.width was 32, is 48 in wide-n50-seed0",
        ),
    ):
        with pytest.raises(UserError, match=r"holds another experiment: .*") as refused:
            claim(Study(make(base, SIZES, change)))
        assert message in str(refused.value)


def test_a_started_study_reads_the_same_images_and_weights(dataset: Path, tmp_path: Path) -> None:
    """Cells from before and after a list of copies was made, or other weights took the place of the first, stood in one
    figure.
    """
    data, weights = open_dataset(shutil.copytree(dataset, tmp_path / "data")), tmp_path / "start.pt"
    base = write_run(tmp_path, tmp_path / "data")
    save(create("ViT-mu/4", 16, 0), weights)
    finetune = base.with_name("finetune.yaml")
    finetune.write_text(yaml.safe_dump(yaml.safe_load(base.read_text()) | {"model": {"image_size": 16}}))
    new = "{name: new, settings: [model.name=ViT-mu/4,model.representation=false]}"
    tuned = ["question=labels", f"models=[{new},{{name: tuned,weights: {weights}}}]"]
    sizes, labels = make(base, SIZES, "name=a0"), make(finetune, SIZES, "name=a1", *tuned)
    for study in (sizes, labels):
        claim(Study(study))
    save(create("ViT-mu/4", 16, 0, seed=1), weights)
    said = rf"a1 holds another experiment: the SHA-256 of {weights} was [0-9a-f]{{64}}, is [0-9a-f]{{64}}\. Set it back"
    with pytest.raises(UserError, match=said):
        claim(Study(labels))
    reason = {"split": "train", "row": 7, "key": data.split("train").keys([7])[0], "reason": "a copy"}
    write_list(data, "copies", pa.Table.from_pylist([reason], EXCLUDED))
    was = rf"data:train \(training\) was {data.fingerprint} without none, is {data.fingerprint} without 1 samples"
    with pytest.raises(UserError, match=f"a0 holds another experiment: {was}"):
        claim(Study(sizes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("schedule.warmup=5%", "schedule.warmup = 5% differs between lengths"),
        ("optimizer.weight_decay_end=0.5", "optimizer.weight_decay_end follows the length of a run"),
        ("train.loss=dino,model.representation=false", "train.loss = dino follows the length of a run"),
    ],
)
def test_a_cooldown_is_refused_where_steps_follow_the_length_of_the_run(
    base: Path, settings: str, message: str
) -> None:
    """The trunk, which is shorter, divided its own length: a branch was another run than one by itself."""
    text = SCALING.replace("budgets: [1.0e-9, 2.0e-9]", "lengths: [10 steps, 20 steps]\ncooldown: 0.2")
    with pytest.raises(UserError, match=message):
        Study(make(base, text, "models=[{name: slim}]", f"settings=[{settings}]"))


def test_the_compute_of_weights_is_that_of_all_runs_that_led_to_them(base: Path) -> None:
    """Of continued pre-training only the last run counted, and of a killed run only what it had done by its last log
    line.
    """

    def trained(name: str, status: str, *settings: str) -> Path:
        run = make_spec(
            name, "pretrain", str(base), [f"name={name}", f"out={base.parent}", "train.length=30 steps", *settings]
        )
        for step in (10, 30) if "finished" in status else (10,):
            checkpoint = run.folder / "checkpoints" / f"step-{step:08d}"
            checkpoint.mkdir(parents=True)
            save(create("ViT-mu/4", 16, 4), checkpoint / "model.safetensors", {})
        (checkpoint.parent / "latest").write_text(checkpoint.name)
        write_settings(run.config, run.folder)
        (run.folder / "status.json").write_text(status)
        weights = run.config.init.weights
        origin = WeightsOrigin(weights, "") if weights else None
        facts = RunFacts(name, "pretrain", steps=30, flops_per_image=1e6, origin=origin)
        PageFolder(run.folder).begin("vit", facts, Start(0.0, 0, []))
        return run.folder

    finished = '{"status": "finished", "step": 30, "code": 0, "reason": ""}'
    first = trained("first", finished)
    last = first / "checkpoints" / "step-00000030"
    (whole,) = compute_of_runs(first)
    assert whole > 0
    # Also by the path that a run's report shows, and of an earlier checkpoint.
    assert compute_of_runs(last) == compute_of_runs(last / "model.safetensors") == [whole]
    assert compute_of_runs(last.with_name("step-00000010")) == pytest.approx([whole / 3])
    assert compute_of_runs(base.parent) == compute_of_runs(base.parent / "elsewhere" / "step-00000010") == [0]
    killed = trained("killed", '{"status": "running", "step": 5, "code": -1, "reason": ""}')
    assert compute_of_runs(killed) == pytest.approx([whole / 3])

    def continued(name: str, weights: Path) -> Path:
        no_name = [f"model.{field}=null" for field in ("name", "width", "depth", "mlp_width", "num_heads")]
        return trained(name, finished, *no_name, "model.representation=true", f"init.weights={weights}")

    second = continued("second", last)
    (last / "model.safetensors").unlink()  # Its run may have removed it.
    third = continued("third", second)
    assert compute_of_runs(third) == pytest.approx([whole, whole, whole])
    save(create("ViT-mu/4", 16, 4), base.parent / "other.safetensors", {})
    notes = list[str]()
    other = continued("other", base.parent / "other.safetensors")
    models = f"models=[{{name: a, weights: {third}}}, {{name: b, weights: {other}}}]"
    longest = pretraining_compute(make(base, SCALING, "question=labels", "budgets=[]", models), "", notes)
    assert longest == pytest.approx(3 * whole)
    assert "by runs" not in notes[0]
    assert "by runs that began with weights whose own pre-training is not known." in notes[1]
