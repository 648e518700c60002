"""Settings: every field means something, every shipped file works, and every mistake is told in one line."""

import copy
import dataclasses
import errno
import json
import math
import re
import runpy
import shlex
import sys
import typing
from pathlib import Path

import jsonschema
import pytest
import yaml
from ranks import ROOT
from settings_classes import COMMANDS
from teacher_weights import teacher_for

from pipeline import objectives
from pipeline.architecture.objectives import OBJECTIVES
from pipeline.base.errors import UserError
from pipeline.estimate.plan import make_plan
from pipeline.experiment.grid import make_run
from pipeline.experiment.vtab import settings_of
from pipeline.experiment.vtab_cell import warmup_steps
from pipeline.model import ViTConfig
from pipeline.objectives.parameters.optimizers import peak_rate
from pipeline.settings import schema, yaml_reader
from pipeline.settings.commands.data import IndexConfig, ShardConfig, VtabPrepareConfig
from pipeline.settings.commands.reports import CompareConfig, GridConfig, SyncConfig
from pipeline.settings.commands.segment import SegmentConfig
from pipeline.settings.commands.study import StudyConfig
from pipeline.settings.commands.transfer import ProtocolConfig, VtabConfig
from pipeline.settings.commands.weights import FeaturesConfig
from pipeline.settings.quantities import Length, Limit, LogInterval
from pipeline.settings.run import ModelConfig, RunConfig

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
    return str(error.value)


def test_the_number_of_a_limit_is_written_like_that_of_a_length() -> None:
    for number, amount in (("9e+6", 9e6), (".5", 0.5), ("90", 90.0)):
        assert Limit.parse(number).amount == Length.parse(f"{number} steps").amount == amount


def test_a_log_interval_is_a_time_or_a_number_of_steps() -> None:
    assert load("train.log_every=0.5 s").train.log_every == LogInterval(0.5, "s")
    for number in ("25", "25 steps"):
        assert load(f"train.log_every={number}").train.log_every == LogInterval(25, "steps")
    assert str(load("train.log_every=10s").train.log_every) == "10 s"
    for wrong in ("0 s", "0", "5%", "2 epochs", "-1"):
        with pytest.raises(UserError, match="log_every"):
            load(f"train.log_every={wrong}")


def test_every_setting_is_read_outside_of_settings() -> None:
    sources = [path for room in ("pipeline", "data_tools", "launch") for path in (ROOT / room).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources if "settings" not in path.relative_to(ROOT).parts)
    # `objectives.new_backbone` hands over all fields that a model has, without naming them.
    named = {*re.findall(r"[.\"'](\w+)\b", text), *ModelConfig().options}
    assert not [name for cls in COMMANDS for name, *_ in schema.leaves(cls) if name.split(".")[-1] not in named]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_is_documented(command: type) -> None:
    rows = schema.describe(command)
    lists = [name for name, kind, *_ in rows if kind == "list of mapping"]  # Their fields follow.
    assert not [name for name, kind, default, doc in rows if len(doc) < 5 or not kind]
    required = [default == "required" for name, _, default, _ in rows if "[]" not in name]
    assert required == sorted(required, reverse=True), "required ones come first"
    for name in lists:
        first = rows.index(next(row for row in rows if row[0] == name)) + 1
        assert rows[first][0].startswith(f"{name}[].")


def test_every_end_of_every_range_is_checked() -> None:
    """A number has a range; one at its end is accepted, and one beyond it is refused with the name and the value."""
    checked = 0
    for command in COMMANDS:
        for name, kind, field, _ in schema.leaves(command):
            limits, kinds = schema.limits_of(kind, field), {kind, *typing.get_args(kind)}
            whole, ends = int in kinds, {"ge": -1, "le": 1, "gt": 0, "lt": 0}
            if not {int, float} & kinds or typing.get_origin(kind) is list:
                continue
            assert {"ge", "gt"} & limits.keys(), f"{command.__name__}.{name}"
            for end, limit in limits.items():
                beyond = ends[end]
                value = limit + beyond * (1 if whole else max(1e-6, abs(limit) * 1e-6))
                if math.isfinite(value):  # There is no number beyond the largest.
                    with pytest.raises(UserError, match=re.escape(f"the command line: {name} = {value!r}")):
                        schema.load(command, None, [f"{name}={value!r}"])
                    checked += 1
    assert checked > 120


def test_a_model_s_settings_are_fields_of_its_configuration() -> None:
    """With the same types, and defaults unless the model's name implies the value; a new model has a representation
    layer.
    """
    ours, theirs = schema.type_hints(ModelConfig), schema.type_hints(ViTConfig)
    defaults = {field.name: field.default for field in dataclasses.fields(ViTConfig)}
    implied = {"width", "depth", "mlp_width", "num_heads", "pool"}
    assert ours.keys() - theirs.keys() == {"name"}
    assert theirs.keys() - ours.keys() == {
        "patch_size",
        "num_classes",
        "stem",
        "axial",
        "layer_norm_eps",
        "masked",
        "kernel",
        "rope_side",
        "pixels",
    }
    for name, value in ModelConfig().options.items():
        kind = theirs[name] | None if name in implied else theirs[name]
        assert ours[name] == (list[int] | None if name == "small_stem" else kind), name
        assert value == (None if name in implied else True if name == "representation" else defaults[name]), name


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_shipped_file_loads_and_plans(path: Path, tmp_path: Path) -> None:
    if path.parent.name in ("data", "index"):
        assert schema.load(ShardConfig if path.parent.name == "data" else IndexConfig, path).source
        return
    if path.parent.name == "grid":
        grid = schema.load(GridConfig, path)
        trial = make_run(grid, "trial", grid.lr[0], seed=0, dev_share=grid.dev_share)
        assert trial.config.data.evaluated_split == "dev"
        return
    if path.parent.name == "study":  # Its cells: tests/experiment/test_study.py.
        assert schema.load(StudyConfig, path).name == path.stem
        return
    if path.parent.name == "segment":
        assert schema.load(SegmentConfig, path, ["weights=here"]).masks
        return
    if path.name == "prepare.yaml":
        assert schema.load(VtabPrepareConfig, path).originals
        return
    if path.parent.name == "vtab":
        protocol = schema.load(VtabConfig, path, ["weights=here"]).protocol
        assert protocol.name == path.stem
        assert schema.build(ProtocolConfig, schema.to_dict(protocol), "results.json") == protocol
        for num_samples in (800, 1000):
            assert all(warmup_steps(protocol, tried, num_samples) >= 0 for tried in settings_of(protocol))
        return
    for overrides in [[], *overrides_in_header(path)]:
        config = schema.load(RunConfig, path, [*overrides, *teacher_for(path, tmp_path, num_classes=1000)])
        num_samples = next(count for name, count in SAMPLES.items() if name in config.data.path)
        train = config.train
        of_whole = OBJECTIVES[train.loss].of_whole_batch
        for world_size in (train.global_batch // train.micro_batch,) if of_whole else (1, 2):
            plan = make_plan(config, num_samples, world_size)
            assert plan.micro_batch * plan.accumulation * world_size == config.train.global_batch
            assert 0 <= plan.warmup < max(1, plan.steps)
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


def overrides_in_header(path: Path) -> list[list[str]]:
    """What a header says may be set, a line each: `#   model.name=ViT-B/32 train.length="7 epochs"    its result`."""
    lines = re.findall(r"^#   ((?:[a-z_]+\.[a-z_]+=\S.*?)) {2,}\S", path.read_text(), re.MULTILINE)
    return [shlex.split(line) for line in lines]


# ViT paper, Table 3, and its caption for clipping: lr, decay, weight decay, dropout, clip. H/14 on ImageNet-21k is L's
# row.
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
    assert (shape.depth, shape.width, shape.mlp_width, shape.patch_size) == (8, 1024, 2048, 32)
    axial = objectives.new_backbone(runs["axial_vit_b16_jft"], 1000)  # D.6
    assert axial.axial


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name:", "name = None"),
        ("seed: true", "seed = true"),
        ("optimizer: {lr: .nan}", "optimizer.lr = .nan"),
        ("data: {eval_split: null}", "data.eval_split = None"),
        ("train: {length: 90}", "train.length = 90"),
        ("model: {image_size: 224x0}", "model.image_size = 224x0"),
        ("probe: {shots: [5, -1]}", "probe.shots[1] = -1"),
        ("probe: {l2: []}", "probe.l2 = []"),
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {length: 1 epochs, lr: [}", "is not valid YAML"),
        ("- a", "must hold a mapping of settings, not ['a']"),
        ("name: a\nname: b", "is not valid YAML: name is set twice"),
        ("train:\n\tlength: 1", "line 2"),
    ],
)
def test_a_file_that_is_not_whole(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        schema.load(RunConfig, write(tmp_path, text))
    assert said in str(error.value)


def test_a_required_setting_that_is_empty_is_refused(tmp_path: Path) -> None:
    """`out=$OUT` without such a variable once meant the current folder."""
    for cls, given, name in (
        (ShardConfig, ["source=photos", "out="], "out"),
        (SyncConfig, ["runs="], "runs"),
        (SyncConfig, ["runs=[]"], "runs"),
        (CompareConfig, ["runs=[one]"], "runs"),
    ):
        with pytest.raises(UserError, match=rf"the command line: {name} (is not set|=)"):
            schema.load(cls, None, given)
    with pytest.raises(UserError, match=r"train\.length is not set"):
        schema.load(RunConfig, write(tmp_path, "name: a\ndata: {path: d}\ntrain: {length: ''}"))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such config file"):
        schema.load(RunConfig, tmp_path / "nowhere.yaml")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
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

    monkeypatch.setattr(yaml_reader, "parse_yaml", fail)
    with pytest.raises(OSError, match="Stale") as error:
        schema.load(RunConfig, write(tmp_path, "name: a"))
    assert str(error.value.filename).startswith(str(tmp_path))


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: a\nmodel: {name: ViT-S/16}\ndata: {path: d}\ntrain: {length: 1 epochs, micro_batch: 8}\noptimizer:\n"
        "augment: {area_min: 1e-3}",  # PyYAML reads 1e-3 as text.
    )
    overrides = [
        "train.global_batch=512",
        "optimizer.lr=1e-3",
        "name=b",
        "train.length=5e2 steps",
    ]
    config = schema.load(RunConfig, path, overrides)
    assert (config.name, config.train.global_batch, config.train.micro_batch) == ("b", 512, 8)
    assert (config.optimizer.lr, config.augment.area_min, str(config.train.length)) == (0.001, 0.001, "500 steps")


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


@pytest.mark.parametrize("text", ["0123", "1.10", "2026-11-01", "1_000", "1:30", "1e5"])
def test_text_is_taken_as_it_was_typed(tmp_path: Path, text: str) -> None:
    """On the command line, and in a file."""
    assert load(f"name={text}").name == text
    path = write(tmp_path, f"name: {text}\nmodel: {{name: ViT-S/16}}\ndata: {{path: d}}\ntrain: {{length: 1 epochs}}")
    assert schema.load(RunConfig, path).name == text


@pytest.mark.parametrize("path", ["trip #2", "#2", "100% &more", "&a b", "!b c", "* d", "a\nb", "[f] g", "it's #3"])
def test_a_path_on_the_command_line_may_have_any_character(path: str) -> None:
    """`source="trip #2"` once read the folder `trip`: the rest was a YAML comment."""
    assert load(f"data.path={path}").data.path == path
    one = schema.load(FeaturesConfig, None, ["weights=w", "out=o.parquet", f"source={path}"])
    assert one.images == [path]


def test_a_list_with_a_comment_in_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"source = \[a #1, b\]"):
        schema.load(FeaturesConfig, None, ["weights=w", "out=o.parquet", "source=[a #1, b]"])
    assert schema.load(FeaturesConfig, None, ["weights=w", "out=o.parquet", "source=['a #1', b]"]).images == [
        "a #1",
        "b",
    ]
    assert schema.load(FeaturesConfig, None, ["weights=w", "out=o.parquet", "source=[ab]*.jpg"]).images == ["[ab]*.jpg"]


def test_null_and_empty_values() -> None:
    assert load("init.weights=null").init.weights is load("init.weights=").init.weights is None
    assert load("track.uri=").track.uri == ""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.globl_batch=3", "unknown setting train.globl_batch. Did you mean train.global_batch?"),
        ("image_size=32", "unknown setting image_size. Did you mean model.image_size?"),
        ("data.mix=x", "data.mix[0] = x"),
        ("seed.x=3", "seed = {'x': '3'}"),
        ("train.length.x=3", "train.length.x"),
        ("mine.yaml", "--config"),
        ("=3", "=3 must be setting=value"),
        ("train=5", "train = 5"),
    ],
)
def test_mistakes_on_the_command_line(override: str, said: str) -> None:
    assert said in refused(override)


def test_override_into_what_the_file_made_a_value(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train = 5: .* train\.micro_batch"):
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
        (["name=a/b"], "name = a/b"),
        (
            ["augment.area_min=0.5", "augment.area_max=0.4"],
            "augment.area_min = 0.5 must not be above augment.area_max = 0.4.",
        ),
        (
            ["augment.crop=resize_crop", "augment.padding=224"],
            "must be below the side",
        ),
        (
            ["augment.crop=resize_crop", "augment.resize_to=100"],
            "augment.resize_to = 100 is smaller than model.image_size = 224",
        ),
        (["augment.eval_resize=223"], "augment.eval_resize = 223 is smaller than model.image_size = 224"),
        (["init.weights=x.npz"], "model.name = 'ViT-Ti/16' and init.weights = 'x.npz': set one of them"),
        (["model.name=nosuch"], "model: 'nosuch' is an unknown model; did you mean"),
        (
            ["model.name=null", "init.weights=x.npz", "init.attentive_pool=true", "init.mean_pool=true"],
            "init.mean_pool and init.attentive_pool",
        ),
        (
            ["model.name=null", "init.weights=x.npz", "init.attentive_pool=true", "init.new_head=false"],
            "init.new_head=true",
        ),
        (
            ["model.name=null", "init.weights=x.npz", "init.attentive_pool=true", "train.freeze=backbone"],
            "Use train.freeze=encoder",
        ),
        (
            ["model.name=null", "init.weights=x.npz", "model.pool=gap", "model.width=64", "model.dropout=0.1"],
            "init.weights determines the architecture: leave out model.width, model.pool.",
        ),
        (["schedule.decay=drops"], "schedule.decay = drops with schedule.drops = []: decay=drops needs shares"),
        (["train.loss=masked_pixels", "augment.mixup=0.2"], "train.loss = masked_pixels predicts no classes"),
        (
            ["train.loss=masked_pixels", "model.name=null", "init.weights=x.npz"],
            "train.loss = masked_pixels starts with a new model",
        ),
        (
            ["train.loss=masked_pixels", "model.representation=false", "checkpoint.best=val_top1"],
            "must be one of val_loss.",
        ),
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
    ],
)
def test_cross_checks_show_their_arithmetic(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["val_share=0.1", "splits.val=v"], "already has a 'val'"),
        (["val_share=0.1", "splits.test=v"], "splits has only test"),
        (["val_share=0.1", "holdout_per_class=5"], "holdout_per_class and val_share"),
        (["holdout_per_class=5", "splits.val=v"], "holdout_per_class holds out images of 'train' as 'val', but"),
        (["min_images=5", "splits.test=v"], "min_images needs a split 'train', but splits has only test"),
        (["label_separator="], "label_separator = ''"),
        (["splits.Train=x"], "Train"),
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
        ("300 epochs", 1_281_167, 93_835),
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
    config = schema.load(RunConfig, path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(schema.to_dict(config), sort_keys=False))
    assert schema.load(RunConfig, tmp_path / "config.yaml") == config


class _EditorLoader(yaml.SafeLoader):
    """Reads 1e-3 as a number, as editors do (YAML 1.2)."""


_EditorLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9.]+e[-+]?[0-9]+$"), [*"-+.0123456789"]
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_shipped_file_names_a_schema_for_editors_that_accepts_it(path: Path) -> None:
    (named,) = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", path.read_text(), re.MULTILINE)
    jsonschema.validate(yaml.load(path.read_text(), _EditorLoader), json.loads((path.parent / named).read_text()))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("pretrain", RunConfig),
        ("shard", ShardConfig),
        ("index", IndexConfig),
        ("vtab_prepare", VtabPrepareConfig),
        ("vtab", VtabConfig),
        ("finetune_grid", GridConfig),
        ("study", StudyConfig),
        ("segment", SegmentConfig),
    ],
)
def test_schemas_are_up_to_date(name: str, command: type) -> None:
    """`make schema` makes them again."""
    file = ROOT / "configs" / "schema" / f"{name}.json"
    assert json.loads(file.read_text()) == json.loads(json.dumps(schema.json_schema(command)))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"no_such_setting": 1}, json.loads(file.read_text()))


def test_probes_of_several_data_sets_are_told_apart_by_their_names() -> None:
    run = ["name=x", "data.path=d", "model.name=ViT-Ti/16", "train.length=1 steps", "probe.every=1 steps"]
    for data, split, said in (
        ("a/own,b/own", "val", "two folders are named own"),
        ("own,old", "val,test,val", "probe.split = val,test,val has 3 names, and probe.data 2"),
        ("own,old", "val,train", "probe.split = train"),
    ):
        with pytest.raises(UserError, match=said):
            schema.load(RunConfig, None, [*run, f"probe.data={data}", f"probe.split={split}"])
    own = schema.load(RunConfig, None, [*run, "probe.data=x/own, s3://b/old?region=eu", "probe.split=val,test"]).probe
    assert own.tested == {"own": ("x/own", "val"), "old": ("s3://b/old?region=eu", "test")}
