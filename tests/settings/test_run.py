"""Settings: every field means something, every shipped file works, and every mistake is told in one line."""

import ast
import copy
import dataclasses
import errno
import inspect
import math
import re
import runpy
import shlex
import sys
import typing
from pathlib import Path

import pytest
import yaml
from teacher_weights import teacher_for

from pipeline import objectives
from pipeline.architecture.variants import configure
from pipeline.base.errors import UserError
from pipeline.base.metric import Metric
from pipeline.estimate.plan import make_plan
from pipeline.experiment.grid import make_run
from pipeline.experiment.vtab import settings_of
from pipeline.experiment.vtab_cell import warmup_steps
from pipeline.model import ViTConfig
from pipeline.objectives.parameters.optimizers import peak_rate
from pipeline.settings import run as settings
from pipeline.settings import run_execution, run_sections, schema, yaml_reader
from pipeline.settings.commands import data as data_settings
from pipeline.settings.commands import operate as tools_settings
from pipeline.settings.commands import reports as suite_settings
from pipeline.settings.commands import segment as segment_settings
from pipeline.settings.commands import study as study_settings
from pipeline.settings.commands import transfer as transfer_settings
from pipeline.settings.commands import weights as weights_settings
from pipeline.settings.commands.data import IndexConfig, ShardConfig, VtabPrepareConfig
from pipeline.settings.objective_checks import OF_WHOLE_BATCH, check_small_views
from pipeline.settings.quantities import Length, Limit
from pipeline.settings.run import RunConfig

ROOT = Path(__file__).parents[2]
CLASSES = {
    **vars(run_sections),
    **vars(run_execution),
    **vars(settings),
    **vars(data_settings),
    **vars(weights_settings),
    **vars(tools_settings),
    **vars(transfer_settings),
    **vars(suite_settings),
    **vars(study_settings),
    **vars(segment_settings),
}
# Classes that hold settings: class -> (where, which).
HOLDERS = {
    "Study": ("config", study_settings.StudyConfig),
    "ShardingJob": ("config", ShardConfig),
    "Prepared": ("config", RunConfig),
    "RunContext": ("config", RunConfig),
    "TrainingRun": ("context.config", RunConfig),
}
TREES = [
    c
    for c in CLASSES.values()
    if dataclasses.is_dataclass(c) and not hasattr(c, "parse") and c not in (schema.Rule, Metric)
]
SECTIONS = {
    inner for cls in TREES for kind in typing.get_type_hints(cls).values() for inner in (kind, *typing.get_args(kind))
}
COMMANDS = [cls for cls in TREES if cls not in SECTIONS]
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))
# Samples of the data set that a path in a shipped file stands for; the smallest ones are the demo's.
SAMPLES = {
    "jft": 303_000_000,
    "imagenet21k": 14_200_000,
    "imagenet": 1_281_167,
    "cifar10": 50_000,
    "pets": 3_680,
    "flowers": 1_020,
    "": 1_400,
}
MINIMAL = {"name": "try", "model": {"name": "ViT-Ti/16"}, "data": {"path": "here"}, "train": {"length": "90 epochs"}}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def load(*overrides: str) -> RunConfig:
    required = ("name=try", "model.name=ViT-Ti/16", "data.path=here", "train.length=90 epochs")
    return schema.load(RunConfig, None, [*required, *overrides])


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as error:
        objectives.check(load(*overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


def leaves(cls: type) -> list[tuple[type, str]]:
    """(class that declares it, field) of every setting that is no section, at every depth."""
    found = []
    for field in dataclasses.fields(cls):
        kind = typing.get_type_hints(cls)[field.name]
        kind = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
        is_section = dataclasses.is_dataclass(kind) and not hasattr(kind, "parse")
        found += leaves(kind) if is_section else [(owner(cls, field.name), field.name)]
    return found


def owner(cls: type, field: str) -> type:
    """The class that a setting was written in: `cls` or one that it inherits from."""
    return next((base for base in cls.__mro__ if field in inspect.get_annotations(base)), cls)


class Reads(ast.NodeVisitor):
    """Which (settings class, field) a source file reads, from annotations: `f(x: TrainConfig)`, `x = config.train`."""

    def __init__(self, found: set[tuple[type, str]]) -> None:
        self.found = found
        self.names: dict[str, type] = {}

    def kind(self, node: ast.AST | None) -> type | None:
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if node is not None and ast.unparse(node) in self.names:
            return self.names[ast.unparse(node)]
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return self.names.get(f"self.{node.attr}")
        hints = typing.get_type_hints(self.kind(node.value) or object)
        return hints.get(node.attr)

    def visit_arg(self, node: ast.arg) -> None:
        found = CLASSES.get(ast.unparse(node.annotation).strip("'")) if node.annotation else None
        # A name without a settings class hides the same name outside.
        self.names.pop(node.arg, None)
        if found is not None:
            self.names[node.arg] = found
        holder = HOLDERS.get(ast.unparse(node.annotation).strip("'")) if node.annotation else None
        if holder is not None:
            self.names[f"{node.arg}.{holder[0]}"] = holder[1]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = dict(self.names)
        self.generic_visit(node)
        stays = {name: kind for name, kind in self.names.items() if name.startswith("self.")}
        self.names = outside | stays

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                kind = self.kind(value)
                if kind is not None and dataclasses.is_dataclass(kind):
                    self.names[ast.unparse(name)] = kind

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        found = CLASSES.get(ast.unparse(node.annotation).strip("'"))
        if found is not None:  # A dataclass's field.
            self.names[f"self.{ast.unparse(node.target)}"] = found
        if holder := HOLDERS.get(ast.unparse(node.annotation)):
            self.names[f"self.{ast.unparse(node.target)}.{holder[0]}"] = holder[1]

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if ast.unparse(node.func) == "isinstance" and (found := CLASSES.get(ast.unparse(node.args[1]))):
            self.names[ast.unparse(node.args[0])] = found

    def visit_Attribute(self, node: ast.Attribute) -> None:
        kind = self.kind(node.value)
        if kind is not None and isinstance(node.ctx, ast.Load):
            self.found.add((owner(kind, node.attr), node.attr))
        self.generic_visit(node)


def reads_of(source: str) -> set[tuple[type, str]]:
    found: set[tuple[type, str]] = set()
    Reads(found).visit(ast.parse(source))
    return found


def test_the_number_of_a_limit_is_written_like_that_of_a_length() -> None:
    for number, amount in (("9e+6", 9e6), (".5", 0.5), ("90", 90.0)):
        assert Limit.parse(number).amount == Length.parse(f"{number} steps").amount == amount


def test_reads_are_told_apart_by_section() -> None:
    source = """
def f(config: RunConfig, t: TrainConfig, other):
    x, y = config.model, 3
    t.loss, x.name, other.seed, config.augment.flip
class C:
    def __init__(self, config: EngineConfig):
        self.config = config
    def g(self):
        return self.config.precision
@dataclass
class D:
    config: OptimizerConfig
    def h(self):
        return self.config.lr
def h(config: WeightsConfig):
    return config.batch if isinstance(config, ViewConfig) and config.eval_crop else 0
"""
    found = {(owner.__name__, name) for owner, name in reads_of(source)}
    expected = {
        ("TrainConfig", "loss"),
        ("ModelConfig", "name"),
        ("AugmentConfig", "flip"),
        ("EngineConfig", "precision"),
        ("OptimizerConfig", "lr"),
        ("WeightsConfig", "batch"),
        ("ViewConfig", "eval_crop"),
    }
    assert found == expected | {("RunConfig", "model"), ("RunConfig", "augment")}


@pytest.mark.slow
def test_every_field_is_read_outside_of_config() -> None:
    # `objectives.new_backbone` hands over all fields that a model has, without naming them.
    found: set[tuple[type, str]] = {(run_sections.ModelConfig, field.name) for field in dataclasses.fields(ViTConfig)}
    for folder in ("pipeline", "data_tools", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            if "settings" not in path.relative_to(ROOT).parts:
                found |= reads_of(path.read_text())
    unread = [
        f"{cls.__name__}.{field}" for command in COMMANDS for cls, field in leaves(command) if (cls, field) not in found
    ]
    assert not unread, f"settings that nothing reads: {unread}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_is_documented(command: type) -> None:
    rows = schema.describe(command)
    lists = [name for name, kind, *_ in rows if kind == "list of mappings"]  # Their fields follow.
    assert len(rows) - len(lists) == len(leaves(command))
    assert not [name for name, kind, default, doc in rows if len(doc) < 5 or not kind]
    required = [default == "required" for name, _, default, _ in rows if "[]" not in name]
    assert required == sorted(required, reverse=True), "required ones come first"
    for name in lists:
        first = rows.index(next(row for row in rows if row[0] == name)) + 1
        assert rows[first][0].startswith(f"{name}[].")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_states_its_range(command: type) -> None:
    numbers = [(name, kind) for name, kind, *_ in schema.describe(command) if "number" in kind]
    assert not [(name, kind) for name, kind in numbers if not re.search(r", (from|at least|above) -?[0-9]", kind)]


def test_every_end_of_every_range_is_checked() -> None:
    """A number at an end of its range is accepted, and one beyond it is refused with the name, the value and the range."""
    checked = 0
    for command in COMMANDS:
        for cls, name in leaves(command):
            (field,) = (field for field in dataclasses.fields(cls) if field.name == name)
            kind, rule = typing.get_type_hints(cls)[name], field.metadata["rule"]
            if not any(number in typing.get_args(kind) or kind is number for number in (int, float)):
                continue
            step = 1 if int in (kind, *typing.get_args(kind)) else 1e-6
            beyond = {
                "min": rule.min is not None and rule.min - max(step, abs(rule.min) * 1e-6),
                "above": rule.above,
                "below": rule.below,
                "max": rule.max is not None and rule.max * (1 if step == 1 else 1 + step) + step,
            }
            for end, value in beyond.items():
                if getattr(rule, end) is None or not math.isfinite(value):  # There is no number beyond the largest.
                    continue
                with pytest.raises(UserError, match=re.escape(rule.range)) as error:
                    schema.load(cls, None, [f"{name}={value!r}"])
                assert f"the command line: {name} = {value!r} must be " in str(error.value)
                checked += 1
                if end in ("min", "max"):
                    assert rule.accepts(getattr(rule, end))
    assert checked > 150


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_shipped_file_loads_and_plans(path: Path, tmp_path: Path) -> None:
    if path.parent.name in ("data", "index"):
        assert schema.load(ShardConfig if path.parent.name == "data" else IndexConfig, path).source
        return
    if path.parent.name == "grid":
        grid = schema.load(suite_settings.GridConfig, path)
        trial = make_run(grid, "trial", grid.lr[0], seed=0, dev_share=grid.dev_share)
        assert trial.config.data.evaluated_split == "dev"
        return
    if path.parent.name == "study":  # Its cells: tests/experiment/test_study.py.
        assert schema.load(study_settings.StudyConfig, path).name == path.stem
        return
    if path.parent.name == "segment":
        assert schema.load(segment_settings.SegmentConfig, path, ["weights=here"]).masks
        return
    if path.name == "prepare.yaml":
        assert schema.load(VtabPrepareConfig, path).originals
        return
    if path.parent.name == "vtab":
        protocol = schema.load(transfer_settings.VtabConfig, path, ["weights=here"]).protocol
        assert protocol.name == path.stem
        assert schema.build(transfer_settings.ProtocolConfig, schema.to_dict(protocol), "results.json") == protocol
        for num_samples in (800, 1000):
            assert all(warmup_steps(protocol, tried, num_samples) >= 0 for tried in settings_of(protocol))
        return
    for overrides in [[], *overrides_in_header(path)]:
        config = schema.load(RunConfig, path, [*overrides, *teacher_for(path, tmp_path, num_classes=1000)])
        num_samples = next(count for name, count in SAMPLES.items() if name in config.data.path)
        train = config.train
        of_whole = train.loss in OF_WHOLE_BATCH
        for world_size in (train.global_batch // train.micro_batch,) if of_whole else (1, 2):
            plan = make_plan(config, num_samples, world_size)
            assert plan.micro_batch * plan.accumulation * world_size == config.train.global_batch
            assert 0 <= plan.warmup < plan.steps
        if config.model.name:
            objectives.new_backbone(config, 1000)


def test_recipes_for_own_images_suit_the_sizes_they_name() -> None:
    """Shards with val_share=0.1 leave 900 to 90,000 training images; their paths are those of the README."""
    scratch, tuned = (ROOT / "configs" / kind / "own_images.yaml" for kind in ("pretrain", "finetune"))
    few, many = overrides_in_header(scratch)[0], overrides_in_header(tuned)[0]
    for path, overrides, num_samples in (
        (scratch, few, 900),
        (scratch, [], 9_000),
        (scratch, [], 90_000),
        (tuned, [], 900),
        (tuned, many, 90_000),
    ):
        run = schema.load(RunConfig, path, overrides)
        plan = make_plan(run, num_samples, 1)
        assert run.data.path == "datasets/photos"
        assert 500 <= plan.steps <= 200_000
        assert 0.01 <= plan.warmup / plan.steps <= 0.2
        # The average forgets the initial weights: less than 1 % of them is left in it.
        decay = run.optimizer.ema_decay
        assert decay**plan.steps < 0.01
        assert "Not measured on a GPU" in path.read_text()


def test_the_row_that_continues_from_dinov2_has_views_that_its_patches_cover() -> None:
    path = ROOT / "configs" / "pretrain" / "dino_own_images.yaml"
    (row,) = [row for row in overrides_in_header(path) if "model.name=null" in row]
    check_small_views(configure("ViT-S/14"), schema.load(RunConfig, path, row).objective["local_size"])


def overrides_in_header(path: Path) -> list[list[str]]:
    """What a header says may be set, a line each: `#   model.name=ViT-B/32 train.length="7 epochs"    its result`."""
    lines = re.findall(r"^#   ((?:[a-z_]+\.[a-z_]+=\S.*?)) {2,}\S", path.read_text(), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def test_headers_list_the_rows_of_the_papers_tables() -> None:
    rows = {path.stem: overrides_in_header(path) for path in SHIPPED}
    assert ["model.name=ViT-L/16", "optimizer.lr=4e-4", "train.length=14 epochs"] in rows["vit_b16_jft"]
    assert len(rows["vit_b16_jft"]) == 13
    assert ["data.limit=9e6", "checkpoint.best=val_top1", "name=vit_b16_jft_9m"] in rows["vit_b16_jft"]
    assert len(rows["vit_b16_imagenet21k_augreg"]) == 15


# ViT paper, Table 3, and its caption for clipping: lr, decay, weight decay, dropout, clip. H/14 on ImageNet-21k is L's row.
TABLE_3 = {
    "vit_b16_jft": (8e-4, "linear", 0.1, 0.0, 0.0),
    "bit_r50x1_jft": (1e-3, "linear", 0.1, 0.0, 0.0),
    "vit_b16_imagenet21k": (1e-3, "linear", 0.03, 0.1, 0.0),
    "vit_l16_imagenet21k": (1e-3, "linear", 0.03, 0.1, 0.0),
    "vit_h14_imagenet21k": (1e-3, "linear", 0.03, 0.1, 0.0),
    "vit_b16_imagenet1k": (3e-3, "cosine", 0.3, 0.1, 1.0),
}


@pytest.mark.parametrize("name", TABLE_3)
def test_shipped_rows_are_those_of_table_3(name: str) -> None:
    run = schema.load(RunConfig, ROOT / "configs" / "pretrain" / f"{name}.yaml")
    found = (run.optimizer.lr, run.schedule.decay, run.optimizer.weight_decay, run.model.dropout, run.optimizer.clip)
    assert found == TABLE_3[name]
    assert (run.optimizer.name, run.optimizer.beta1, run.optimizer.beta2) == ("adam", 0.9, 0.999)
    assert (run.train.global_batch, str(run.schedule.warmup), run.model.image_size) == (4096, "10000 steps", (224, 224))


def test_recipes_blend_contrast_as_their_sources_do() -> None:
    """big_vision's runs with the pixel count; DeiT and Compact Transformers, by timm's operations, with the mean."""
    runs = {path.stem: schema.load(RunConfig, path) for path in SHIPPED if path.parent.name == "pretrain"}
    found = {name: run.augment.randaugment_contrast for name, run in runs.items() if run.augment.randaugment_layers}
    assert found == {
        "vit_b16_imagenet1k_augreg": "pixel_count",
        "vit_b16_imagenet21k_augreg": "pixel_count",
        "vit_s16_imagenet1k_better": "pixel_count",
        "vit_s16_imagenet1k_improved": "mean",
        "vit_cifar10_improved": "mean",
        "own_images": "mean",
    }


def test_fine_tuning_of_l16_has_the_dropout_of_its_authors() -> None:
    """vit_jax/configs/models.py: 0.1 for L/16, whose weights these files start from, 0 for B/16, which a header row names."""
    shipped = [path for path in SHIPPED if path.stem.endswith("_384px")]
    assert len(shipped) == 5
    for path in shipped:
        run = schema.load(RunConfig, path)
        assert (run.init.weights, run.model.dropout) == ("runs/vit_l16_imagenet21k", 0.1)
        assert ["init.weights=runs/vit_b16_imagenet21k", "model.dropout=0"] in overrides_in_header(path)
    for path in SHIPPED:
        if path.parent.name == "grid":
            grid = schema.load(suite_settings.GridConfig, path)
            assert make_run(grid, "final", grid.lr[0], seed=0, dev_share=0.0).config.model.dropout == 0.1


def test_the_other_experiments_of_the_paper_s_appendix_are_shipped() -> None:
    runs = {
        name: schema.load(RunConfig, ROOT / "configs" / "pretrain" / f"{name}.yaml")
        for name in ("bit_r50x1_jft_sgd", "vit_b16_jft_gap", "vit_shapes_jft", "axial_vit_b16_jft")
    }
    assert all(str(run.train.length) == "7 epochs" and run.train.global_batch == 4096 for run in runs.values())
    sgd = runs["bit_r50x1_jft_sgd"].optimizer  # D.1, Table 7: BiT's settings
    assert (sgd.name, peak_rate(sgd, 4096), sgd.weight_decay) == ("sgd", pytest.approx(0.48), 1e-4)
    gap = runs["vit_b16_jft_gap"]  # D.3, Figure 9
    assert (gap.model.pool, gap.model.representation, gap.optimizer.lr) == ("gap", False, 3e-4)
    shape = objectives.new_backbone(runs["vit_shapes_jft"], 1000)  # D.2: the base of all shapes
    assert isinstance(shape, ViTConfig)
    assert (shape.depth, shape.width, shape.mlp_width, shape.patch_size) == (8, 1024, 2048, 32)
    axial = objectives.new_backbone(runs["axial_vit_b16_jft"], 1000)  # D.6
    assert isinstance(axial, ViTConfig)
    assert axial.axial


def test_there_are_shipped_files() -> None:
    assert {path.parent.name for path in SHIPPED} >= {"data", "pretrain"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nmae: x", "unknown setting nmae. Did you mean name?"),
        ("train: {globl_batch: 3}", "unknown setting train.globl_batch. Did you mean train.global_batch?"),
        ("zebra: 1", "unknown setting zebra. Known here: name, out, seed, model"),
        ("train: 5", "train must be a mapping of settings, not 5"),
        ("name:", "name = None must be text"),
        ("augment: {flip: 0}", "augment.flip = 0 must be true or false."),
        ("objective: 3", "objective = 3 must be a mapping."),
        ("seed: 1.5", "seed = 1.5 must be a whole number"),
        ("seed: .inf", "seed = .inf must be a whole number"),
        ("seed: .nan", "seed = .nan must be a whole number"),
        ("seed: true", "seed = True must be a whole number"),
        ("optimizer: {lr: fast}", "optimizer.lr = fast must be a number"),
        ("optimizer: {lr: .nan}", "optimizer.lr = .nan must be a number"),
        ("augment: {flip: 1}", "augment.flip = 1 must be"),
        ("engine: {zero_stage: 4}", "engine.zero_stage = 4 must be one of 0, 1, 2, 3."),
        ("engine: {zero_stage: true}", "engine.zero_stage = True must be one of"),
        ("train: {length: 90}", "train.length = 90: write a length as '90 epochs'"),
        ("train: {length: 1.2.3 steps}", "write a length as"),
        ("model: {image_size: 224x0}", "model.image_size = 224x0: a side has from 1 to 16,384 pixels."),
        ("train: {micro_batch: 0}", "train.micro_batch = 0 must be from 1 to 16,777,216."),
        ("augment: {area_min: 0}", "augment.area_min = 0 must be above 0 and at most 1."),
        ("probe: {shots: [5, -1]}", "probe.shots = -1 must be at least 0."),
        ("probe: {l2: []}", "probe.l2 = [] must have at least one value."),
        ("schedule: {drops: [0.3, 1]}", "schedule.drops = 1 must be above 0 and below 1."),
        ("model: {image_size: 224x}", "model.image_size = 224x: write the side of a square, as 224, or height x width"),
    ],
)
def test_mistakes_in_a_file(text: str, said: str, tmp_path: Path) -> None:
    tree = copy.deepcopy(MINIMAL)
    for section, value in yaml.safe_load(text).items():
        if isinstance(value, dict):
            tree.setdefault(section, {}).update(value)
        else:
            tree[section] = value
    path = write(tmp_path, yaml.safe_dump(tree, sort_keys=False))
    with pytest.raises(UserError) as error:
        schema.load(RunConfig, path)
    assert said in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {name: ViT-Ti/16}\nname: a\ndata: {path: d}", "train.length is not set (Length of the run"),
        ("train: {length: 1 epochs, lr: [}", "is not valid YAML"),
        ("- a", "must hold a mapping of settings, not ['a']"),
        ("name: a\nname: b", "is not valid YAML: name is set twice (line 2, column 1)"),
        ("train:\n\tlength: 1", "found character '\\t' that cannot start any token (line 2, column 1)"),
        (
            "train.length: 1 epochs",
            "unknown setting train.length. In a file, write it in its section: train: {length: ...}",
        ),
        ("", "must hold a mapping of settings, not None"),
    ],
)
def test_a_file_that_is_not_whole(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        schema.load(RunConfig, write(tmp_path, text))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_required_setting_that_is_empty_is_not_set(tmp_path: Path) -> None:
    """`out=$OUT` without such a variable once meant the current folder."""
    with pytest.raises(UserError, match=r"the command line: out is not set \(Folder or URL .*\)\. Set it: out="):
        schema.load(ShardConfig, None, ["source=photos", "out="])
    with pytest.raises(UserError, match=r"the command line: runs is not set"):
        schema.load(suite_settings.SyncConfig, None, ["runs="])
    with pytest.raises(UserError, match=r"train\.length is not set"):
        schema.load(RunConfig, write(tmp_path, "name: a\ndata: {path: d}\ntrain: {length: ''}"))


REQUIRED_LISTS = [
    (command, name)
    for command in COMMANDS
    for name, kind, field, _ in schema.leaves(command)
    if typing.get_origin(kind) is list and field.default is field.default_factory
]


def test_commands_have_lists_that_must_be_set() -> None:
    assert len({command for command, _ in REQUIRED_LISTS}) > 5


@pytest.mark.parametrize(("command", "name"), REQUIRED_LISTS)
def test_a_required_list_without_an_item_is_refused(command: type, name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} = \[\] must have at least"):
        schema.load(command, None, [f"{name}=[]"])


def test_a_run_has_some_image_sizes_at_most() -> None:
    """With 20,001 it was planned for minutes, without a word."""
    assert "train.image_sizes has 20,001 values: 32 at most." in refused(
        f"train.image_sizes=[{','.join(['128'] * 20_001)}]"
    )


def test_an_entry_of_a_list_that_lacks_a_setting_is_told_where_to_write_it() -> None:
    """It said "Set it: data.mix[0].weight=...", which no command line accepts."""
    with pytest.raises(
        UserError, match=r"data\.mix\[0\]\.weight is not set \(.*\)\. Write it into that entry: {weight: \.\.\.}"
    ):
        schema.load(RunConfig, None, ["data.mix=[{path: b}]"])


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such config file"):
        schema.load(RunConfig, tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="is a folder"):
        schema.load(RunConfig, tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not valid YAML"):
        schema.load(RunConfig, tmp_path / "binary.yaml")


def test_a_file_server_that_fails_is_no_mistake_in_the_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was exit code 2, after which no supervisor starts the run again."""

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(yaml_reader, "open", fail, raising=False)
    with pytest.raises(OSError, match="Stale") as error:
        schema.load(RunConfig, write(tmp_path, "name: a"))
    assert str(error.value.filename).startswith(str(tmp_path))


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: a\nmodel: {name: ViT-S/16}\ndata: {path: d}\ntrain: {length: 1 epochs, micro_batch: 8}\noptimizer:",
    )
    overrides = [
        "train.global_batch=512",
        "optimizer.lr=1e-3",
        "name=b",
        "augment.flip=false",
        "train.length=5e2 steps",
    ]
    config = schema.load(RunConfig, path, overrides)
    assert (config.name, config.train.global_batch, config.train.micro_batch) == ("b", 512, 8)
    assert (config.optimizer.lr, config.augment.flip, str(config.train.length)) == (0.001, False, "500 steps")


def test_number_without_a_dot_in_a_file(tmp_path: Path) -> None:
    # PyYAML reads 1e-3 as text.
    path = write(
        tmp_path,
        "name: a\nmodel: {name: ViT-S/16}\ndata: {path: d}\ntrain: {length: 1 epochs}\noptimizer: {lr: 1e-3}\nseed: 1e3",
    )
    config = schema.load(RunConfig, path)
    assert (config.optimizer.lr, config.seed) == (0.001, 1000)


def test_an_image_size_is_a_side_or_height_and_width() -> None:
    config = load("model.image_size=224x384", "augment.eval_resize=224")
    assert config.model.image_size == (224, 384)
    assert objectives.new_backbone(config, 10).grid == (14, 24)
    assert schema.build(RunConfig, schema.to_dict(config), "again") == config
    assert schema.to_dict(load())["model"]["image_size"] == "224"
    assert schema.build(
        RunConfig, {**MINIMAL, "model": {"name": "ViT-Ti/16", "image_size": 96}}, "old"
    ).model.image_size == (96, 96)


def test_override_of_a_whole_section_and_of_a_mapping() -> None:
    config = load("train={length: 3 steps, loss: softmax}", "train.micro_batch=2")
    assert (config.train.length.steps(1, 1), config.train.loss, config.train.micro_batch) == (3, "softmax", 2)
    shards = schema.load(ShardConfig, None, ["source=a", "out=b", "splits.train=x/1", "splits.test=007"])
    assert shards.splits == {"train": "x/1", "test": "007"}
    assert schema.load(ShardConfig, None, ["source=a", "out=b", "splits={a: b}"]).splits == {"a": "b"}
    assert ShardConfig(source="a", out="b").splits == {"train": ""}


@pytest.mark.parametrize("text", ["0123", "1.10", "2026-11-01", "1_000", "on", "1:30", "1e5", "a: b"])
def test_text_on_the_command_line_is_taken_as_it_was_typed(text: str) -> None:
    assert load(f"name={text}").name == text


@pytest.mark.parametrize(
    "path", ["trip #2", "#2", "100% &more", "&a b", "!b c", "* d", "a\nb", "- e", "[f] g", "it's #3"]
)
def test_a_path_on_the_command_line_may_have_any_character(path: str) -> None:
    """`source="trip #2"` once read the folder `trip`: the rest was a YAML comment."""
    assert load(f"data.path={path}").data.path == path
    assert load(f"track.parent_run={path}").track.parent_run == path
    one = schema.load(weights_settings.FeaturesConfig, None, ["weights=w", "out=o.parquet", f"images={path}"])
    assert one.images == (["e"] if path == "- e" else [path])


def test_a_list_with_a_comment_in_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"images = \[a #1, b\] is no list: .*expected ',' or '\]'"):
        schema.load(weights_settings.FeaturesConfig, None, ["weights=w", "out=o.parquet", "images=[a #1, b]"])
    assert schema.load(
        weights_settings.FeaturesConfig, None, ["weights=w", "out=o.parquet", "images=['a #1', b]"]
    ).images == ["a #1", "b"]
    assert schema.load(
        weights_settings.FeaturesConfig, None, ["weights=w", "out=o.parquet", "images=[ab]*.jpg"]
    ).images == ["[ab]*.jpg"]


@pytest.mark.parametrize("text", ["0123", "1.10", "2026-11-01", "1_000", "1:30", "1e5"])
def test_text_in_a_file_is_taken_as_it_was_typed(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, f"name: {text}\nmodel: {{name: ViT-S/16}}\ndata: {{path: d}}\ntrain: {{length: 1 epochs}}")
    assert schema.load(RunConfig, path).name == text


def test_a_setting_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nmodel: {name: ViT-S/16}\nseed: 1\nseed: 2")
    with pytest.raises(UserError, match=r"seed is set twice.*line 4"):
        schema.load(RunConfig, path)


def test_null_and_empty_values() -> None:
    assert load("init.weights=null").init.weights is load("init.weights=").init.weights is None
    assert load("track.uri=").track.uri == ""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "train.globl_batch=3",
            "the command line: unknown setting train.globl_batch. Did you mean train.global_batch?",
        ),
        ("trian.length=3", "the command line: unknown setting trian.length. Did you mean train.length?"),
        ("image_size=32", "the command line: unknown setting image_size. Did you mean model.image_size?"),
        ("train.lr=3", "the command line: unknown setting train.lr. Did you mean optimizer.lr?"),
        ("trian.x=3", "the command line: unknown setting trian.x. Did you mean train?"),
        ("init.weight=x", "unknown setting init.weight. Did you mean init.weights or data.weight?"),
        ("data.mix=x", "data.mix[0] must be a mapping of settings, not x. Write data.mix=[{path: ..., weight: ..., "),
        ("data=x", "data must be a mapping of settings, not x. Set one of them: data.path=..., "),
        ("seed.x=3", "the command line: seed is a single value, so there is no seed.x"),
        ("train.length.x=3", "train.length is a single value"),
        ("train", "'train' is no override: write setting=value"),
        ("config=a.yaml", "unknown setting config. A file of settings is given by --config FILE."),
        ("mine.yaml", "'mine.yaml' is no override: write --config mine.yaml"),
        ("=3", "'=3' is no override"),
        ("train=5", "the command line: train must be a mapping of settings, not 5"),
        ("train.micro_batch=x", "the command line: train.micro_batch = x must be a whole number"),
        ("train.length=[", "the command line: train.length = [: write a length as"),
    ],
)
def test_mistakes_on_the_command_line(override: str, said: str) -> None:
    assert said in refused(override)


def test_override_into_what_the_file_made_a_value(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train is 5 in the file, so train\.micro_batch cannot be set"):
        schema.load(RunConfig, write(tmp_path, "train: 5"), ["train.micro_batch=3"])
    path = write(tmp_path, "source: a\nout: b\nsplits:")
    assert schema.load(ShardConfig, path, ["splits.train=x"]).splits == {"train": "x"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["train.global_batch=100"],
            "train.global_batch = 100 is not divisible by data.streams = 16. Use data.streams=4.",
        ),
        (["train.micro_batch=0"], "the command line: train.micro_batch = 0 must be from 1 to 16,777,216."),
        (["evaluate.every=0 steps"], "evaluate.every = 0 steps must be above 0."),
        (["checkpoint.every=0%"], "checkpoint.every = 0% must be above 0."),
        (["optimizer.beta2=1"], "optimizer.beta2 = 1 must be at least 0 and below 1."),
        (["optimizer.weight_decay=-1"], "optimizer.weight_decay = -1 must be at least 0."),
        (["seed=-1"], "seed = -1 must be from 0 to 9,223,372,036,854,775,807."),
        (["seed=9223372036854775808"], "seed = 9223372036854775808 must be from 0 to 9,223,372,036,854,775,807."),
        (["train.stop_after_minutes=0.5"], "train.stop_after_minutes = 0.5 leaves no time to train"),
        (["model.dropout=1.5"], "model.dropout = 1.5 must be at least 0 and below 1."),
        (["name=a/b"], "name = a/b must be a plain folder name."),
        (["name=.."], "must be a plain folder name"),
        (
            ["augment.area_min=0.5", "augment.area_max=0.4"],
            "augment.area_min = 0.5 must not be above augment.area_max = 0.4.",
        ),
        (["augment.aspect_min=2"], "augment.aspect_min = 2.0 must not be above augment.aspect_max = 1.33"),
        (
            ["augment.crop=resize_crop", "augment.padding=224"],
            "must be below the side",
        ),
        (
            ["augment.crop=resize_crop", "augment.resize_to=100"],
            "augment.resize_to = 100 is smaller than model.image_size = 224",
        ),
        (["augment.eval_resize=223"], "augment.eval_resize = 223 is smaller than model.image_size = 224"),
        (["augment.randaugment_magnitude=21"], "augment.randaugment_magnitude = 21 must be from 0 to 20."),
        (["augment.randaugment_layers=-1"], "augment.randaugment_layers = -1 must be from 0 to 100."),
        (["augment.mixup=2"], "augment.mixup = 2 must be from 0 to 1."),
        (["augment.erase=-0.1"], "augment.erase = -0.1 must be from 0 to 1."),
        (
            ["init.weights=x.npz"],
            "init.weights = 'x.npz' determines the architecture, so model.name = 'ViT-Ti/16' must not be set",
        ),
        (["model.name=nosuch"], 'model: "nosuch" is an unknown model; did you mean'),
        (["model.name=null"], "neither model.name nor init.weights is set"),
        (["model.name=", "init.weights="], "neither model.name nor init.weights is set"),
        (["init.weights=", "init.mean_pool=true"], "Set init.mean_pool=false; a new model pools so with"),
        (["init.weights=", "init.attentive_pool=true"], "a new model pools so with model.pool=attentive"),
        (
            ["model.name=null", "init.weights=x.npz", "init.attentive_pool=true", "init.mean_pool=true"],
            "two things for the head to read",
        ),
        (
            ["model.name=null", "init.weights=x.npz", "init.attentive_pool=true", "init.new_head=false"],
            "init.attentive_pool=true changes what the head reads",
        ),
        (
            ["model.name=null", "init.weights=x.npz", "init.attentive_pool=true", "train.freeze=backbone"],
            "Use train.freeze=encoder",
        ),
        (["init.kernel=bicubic"], "init.kernel = bicubic resamples the positions of init.weights, which are not set"),
        (
            ["model.name=null", "init.weights=x.npz", "model.pool=gap", "model.width=64", "model.dropout=0.1"],
            "init.weights determines the architecture: leave out model.width, model.pool.",
        ),
        (["schedule.decay=drops"], "schedule.decay = drops with schedule.drops = []: decay=drops needs shares"),
        (["schedule.drops=[0.3,0.6]"], "schedule.decay = linear with schedule.drops = [0.3, 0.6]"),
        (["train.label_smoothing=0.1"], "train.label_smoothing = 0.1 has no effect without train.loss = softmax"),
        (["train.loss=masked_pixels", "augment.mixup=0.2"], "train.loss = masked_pixels predicts no classes"),
        (
            ["train.loss=masked_pixels", "model.name=null", "init.weights=x.npz"],
            "train.loss = masked_pixels starts with a new model",
        ),
        (["train.loss=masked_pixels", "checkpoint.best=val_top1"], "must be one of val_loss."),
        (["checkpoint.best=val_top9"], "checkpoint.best = 'val_top9' must be one of val_top1, val_top5, val_loss"),
        (["engine.zero_stage=0"], "wrong first Adam step"),
        (
            [
                "optimizer.name=muon",
                "model.name=null",
                "init.weights=x.npz",
                "train.loss=softmax",
                "train.freeze=backbone",
            ],
            "none of which train.freeze = backbone trains",
        ),
        (
            [
                "model.name=null",
                "init.weights=x.npz",
                "optimizer.name=muon",
                "train.loss=softmax",
                "train.freeze=encoder",
            ],
            "none of which train.freeze = encoder trains",
        ),
    ],
)
def test_cross_checks_show_their_arithmetic(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["val_share=1"], "val_share = 1 must be at least 0 and below 1."),
        (["val_share=0.1", "splits.val=v"], "already has a 'val'"),
        (["val_share=0.1", "splits.test=v"], "splits has only test"),
        (["val_share=0.1", "holdout_per_class=5"], "both hold out 'val': use one of them"),
        (["holdout_per_class=5", "splits.val=v"], "holdout_per_class holds out images of 'train' as 'val', but"),
        (["min_images=5", "splits.test=v"], "min_images needs a split 'train', but splits has only test"),
        (["min_images=-1"], "min_images = -1 must be at least 0."),
        (["label_separator="], "label_separator = '' must be text that is not empty."),
        (["samples_per_shard=0"], "samples_per_shard = 0 must be at least 1."),
        (["splits.Train=x"], "in lower-case letters"),
    ],
)
def test_sharding_checks(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        schema.load(ShardConfig, None, ["source=a", "out=b", *overrides])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("length", "num_samples", "steps"),
    [
        # protocol.md B1: steps at batch 4096.
        ("90 epochs", 14_200_000, 312_012),
        ("30 epochs", 14_200_000, 104_004),
        ("300 epochs", 1_281_167, 93_835),
        ("7 epochs", 303_000_000, 517_822),
        ("14 epochs", 303_000_000, 1_035_645),
        ("1.278e9 samples", 14_200_000, 312_012),
        ("312012 steps", 5, 312_012),
        ("1 step", 5, 1),
        ("0.5 epoch", 8192, 1),
        (".5 epochs", 12_288, 2),  # 1.5 steps: halves go up
    ],
)
def test_lengths_in_steps(length: str, num_samples: int, steps: int) -> None:
    assert Length.parse(length).steps(num_samples, 4096) == steps


def test_length_as_a_share() -> None:
    assert Length.parse("5%").steps(1, 1, total_steps=312_012) == 15_601
    assert Length.parse("0.1 %").steps(1, 1, total_steps=1000) == 1
    with pytest.raises(UserError, match=r"train\.length = 5% is a share of itself"):
        Length.parse("5%").steps(1, 1)


@pytest.mark.parametrize(
    "text", ["1035645 steps", "1234567890 samples", "0.1%", "12.5 epochs", "1 step", "1.2e9 samples"]
)
def test_a_length_is_read_back_as_it_was(text: str) -> None:
    length = Length.parse(text)
    assert Length.parse(str(length)) == length


def test_a_tree_is_read_back_as_it_was() -> None:
    config = load("train.length=1035645 steps", "optimizer.lr=0.1234567891", "seed=9007199254740993", "model.width=8")
    assert config.seed == 2**53 + 1
    again = schema.build(RunConfig, schema.to_dict(config), "checkpoint")
    assert again == config
    changed = load("train.length=1035646 steps", "optimizer.lr=0.1234567891", "seed=9007199254740993", "model.width=8")
    assert schema.to_dict(changed) != schema.to_dict(config)
    flat = schema.flatten(schema.to_dict(config))
    assert (flat["train.length"], flat["model.width"], flat["name"]) == ("1035645 steps", 8, "try")
    assert len(flat) + 1 == len(list(schema.leaves(RunConfig))), "all but the mapping `objective`, which is empty"


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("pretrain.py", RunConfig),
        ("shard.py", ShardConfig),
        ("index.py", IndexConfig),
        ("vtab_prepare.py", VtabPrepareConfig),
        ("vtab.py", transfer_settings.VtabConfig),
        ("supervise.py", tools_settings.SuperviseConfig),
        ("vtab_report.py", suite_settings.VtabReportConfig),
        ("compare.py", suite_settings.CompareConfig),
        ("finetune_grid.py", suite_settings.GridConfig),
        ("segment.py", segment_settings.SegmentConfig),
    ],
)
def test_help_lists_every_field(
    script: str, command: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / "launch" / script), run_name="__main__")
    text = capsys.readouterr().out
    lines, said = text.splitlines(), " ".join(text.split())
    for name, kind, default, doc in schema.describe(command):
        assert any(line.startswith(f"  {name}  ({kind}; ") and default in line for line in lines), name
        assert " ".join(doc.split()) in said, name


@pytest.mark.parametrize("path", sorted((ROOT / "configs/pretrain").glob("*.yaml")), ids=lambda path: path.stem)
def test_config_yaml_of_a_run_is_accepted_again(path: Path, tmp_path: Path) -> None:
    """A run writes all its settings as YAML, for its MLflow page and for another run with --config."""
    config = schema.load(settings.RunConfig, path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(schema.to_dict(config), sort_keys=False))
    assert schema.load(settings.RunConfig, tmp_path / "config.yaml") == config
