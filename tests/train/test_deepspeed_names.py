"""Names of DeepSpeed that are not public, each looked up in a real engine: one that a new version has changed fails by
its name.
"""

import inspect
import json
import pkgutil
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import TINY
from forked import Forge

import pipeline
from pipeline.train.zero.internals import deepspeed

# Where parameters and gradients are, by stage and precision; then functions that are replaced.
NAMES = {
    (1, "bf16"): (
        "optimizer.fp32_groups_flat_partition",
        "optimizer.bf16_groups",
        "optimizer.fp32_groups_gradients",
        "optimizer.fp32_groups_gradients_flat",
        "optimizer.update_hp_grads",
        "optimizer.clear_hp_grads",
        "optimizer.get_grads_for_norm",
        "optimizer.update_lp_params",
        "parameter._hp_mapping.lp_fragment_address.start",
        "parameter._hp_mapping.lp_fragment_address.numel",
        "parameter._hp_mapping.hp_fragment_address.start",
    ),
    (2, "bf16"): (
        "optimizer.single_partition_of_fp32_groups",
        "optimizer.bit16_groups",
        "optimizer.update_lp_params",
        "parameter._hp_mapping.lp_fragment_address.start",
        "parameter._hp_mapping.lp_fragment_address.numel",
        "parameter._hp_mapping.hp_fragment_address.start",
    ),
    (2, "fp16"): tuple(
        f"optimizer.loss_scaler.{name}" for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    ),
    (3, "bf16"): (
        "optimizer.fp32_partitioned_groups_flat",
        "optimizer.fp16_groups",
        "optimizer.grad_position",
        "optimizer.get_param_id",
        "optimizer.persistent_parameters",
        "optimizer._reassign_or_swap_out_partitioned_parameters",
        "optimizer._partition_all_parameters",
        "parameter.ds_tensor.ds_numel",
        "parameter.ds_numel",
        "parameter.partition",
        "parameter.all_gather",
    ),
}
MODULES = (
    "runtime.compiler.compile",
    "runtime.zero.muon.original_muon",
    "runtime.zero.stage3.z3_leaf_parameter",
    "runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses",
)
CASES = [(stage, precision, name) for (stage, precision), names in NAMES.items() for name in names]


def look_up(nothing: Any) -> None:
    """In a rank: prints the names that an engine of each stage and precision lacks."""
    from rank_memory import get_accelerator, make_engine

    from pipeline.process.distributed import from_environment
    from pipeline.settings import schema
    from pipeline.settings.run import RunConfig
    from pipeline.train.zero.engine import start_ranks

    get_accelerator().is_fp16_supported = lambda: True
    ranks = from_environment()
    start_ranks(ranks)
    lacking = []
    for (stage, precision), names in NAMES.items():
        given = [*TINY, f"engine.zero_stage={stage}", f"engine.precision={precision}"]
        engine, _ = make_engine(schema.load(RunConfig, None, given), 4, ranks)
        found = {"optimizer": engine.engine.optimizer, "parameter": next(engine.objective.parameters())}
        for name in names:
            whose, _, path = name.partition(".")
            try:
                attrgetter(path)(found[whose])
            except AttributeError:
                lacking.append([stage, precision, name])
    print("lacking", json.dumps(lacking), flush=True)


@pytest.fixture(scope="module")
def lacking(forge: Forge) -> list[list[Any]]:
    said = forge.start_work(1, "test_deepspeed_names:look_up", None).finish()
    return json.loads(re.search(r"^lacking (.*)$", said, re.MULTILINE)[1])  # type: ignore[index]


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "precision", "name"), CASES)
def test_an_engine_has_the_name(stage: int, precision: str, name: str, lacking: list[list[Any]]) -> None:
    assert [stage, precision, name] not in lacking


@pytest.mark.parametrize("name", MODULES)
def test_deepspeed_has_the_name(name: str) -> None:
    assert pkgutil.resolve_name(f"deepspeed.{name}")


def test_deepspeed_keeps_the_operators_that_it_can_build() -> None:
    assert "__compatible_ops__" in inspect.getsource(deepspeed.ops), "where internals.py sets them"


def test_deepspeed_lets_an_optimizer_reduce_its_gradients() -> None:
    assert "self.optimizer.reduce_gradients(" in inspect.getsource(deepspeed.DeepSpeedEngine)


def test_they_stand_in_one_file() -> None:
    words = {word for _, _, name in CASES for word in name.split(".")[1:]} - {
        "start",
        "numel",
        "partition",
        "all_gather",
    }
    used = re.compile(rf"\b({'|'.join(words)})\b")
    root = Path(pipeline.__file__).parent
    found = {str(path.relative_to(root)): used.findall(path.read_text()) for path in root.rglob("*.py")}
    assert found.pop("train/zero/internals.py")
    assert not {path: names for path, names in found.items() if names}
