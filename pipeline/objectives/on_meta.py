"""An objective on the meta device, where tensors have shapes but no memory: its loss runs there to count memory and
arithmetic.

Nothing waits for a device and nothing is computed, so `loss` must choose no shape by a value.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_map

from pipeline.data.loading.loader import Batch
from pipeline.model import Config, ViTConfig, build
from pipeline.objectives.parameters.trained import NOTHING, num_frozen_blocks
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig

if TYPE_CHECKING:
    from pipeline.objectives.objective import Inputs, Objective

META = torch.device("meta")
T = TypeVar("T")
_IMAGES = 4  # of a micro-batch whose arithmetic is counted


@cache
def shallow(config: Config, frozen: str = NOTHING) -> tuple[Config, Config, int] | None:
    """Returns models of depth 2 and 3, and how much deeper than the first the model is; None unless it is a ViT
    deeper than both, and without a stem, which takes longer than its blocks. Also if blocks of it are frozen, as
    `train.freeze` says.

    All blocks but the first are alike, so what each adds to a count is the difference of the two; counting all 56 takes
    seconds.
    """
    if (
        not isinstance(config, ViTConfig)
        or config.has_stem
        or config.depth <= 3
        or num_frozen_blocks(frozen, config.depth) is not None
    ):
        return None
    return replace(config, depth=2), replace(config, depth=3), config.depth - 2


def of_depth(config: Config, count: Callable[[Config], T], frozen: str = NOTHING) -> T:
    """What `count` gives for a model, of a deep one from two `shallow` ones. It returns numbers, in any nesting of
    tuples and dicts.
    """
    if not (found := shallow(config, frozen)):
        return count(config)
    *models, deeper = found
    return through((0, 1), [count(one) for one in models], deeper)


def through(points: Sequence[int], found: Sequence[T], at: int) -> T:
    """Extrapolates each of the whole numbers found at some points by the polynomial through these."""
    fractions = [math.prod(Fraction(at - two, one - two) for two in points if two != one) for one in points]
    return tree_map(lambda *numbers: round(sum(map(operator.mul, fractions, numbers))), *found)


def remembered(function: Callable[..., T]) -> Callable[..., T]:
    """A cache of a function of (objective's class, config, more): a RunConfig is not hashable.

    Settings of the engine and the micro-batch are not part of the key: what depends on them is in `more`.
    """
    known: dict[Any, T] = {}

    @wraps(function)
    def found(cls: type["Objective"], config: RunConfig, *more: Any) -> T:
        train = config.train
        trained = [train.loss, train.freeze, train.lora_rank, train.lora_layers, config.data.targets]
        sections = [config.objective, config.model, config.init, config.augment]
        key = (cls, repr([*trained, *sections, config.seed]), *more)
        if key not in known:
            known[key] = function(cls, config, *more)
        return known[key]

    return found


def make(cls: type["Objective"], config: RunConfig, model: Config, dtype: torch.dtype) -> "Objective":
    """The objective on the meta device, in training mode, with parameters of `dtype`; buffers stay as they are."""
    with META:
        objective = cls.of(config, build(model))
    objective.num_steps = 1
    return cast(objective, dtype)


def cast(objective: "Objective", dtype: torch.dtype) -> "Objective":
    """The objective with parameters of `dtype`, as the engine has it: buffers stay as they are. In training mode."""
    for parameter in objective.parameters():
        parameter.data = parameter.data.to(dtype)
    return objective.train()


def inputs(objective: "Objective", config: RunConfig, images: int, dtype: torch.dtype) -> "Inputs":
    """What `loss` reads of a micro-batch of so many images, by the objective's own `inputs`; views of `dtype`."""
    pixels = objective.pixels
    groups = [
        (group.count, images, *ImageSize.parse(group.size), pixels.num_channels) for group in objective.views(config)
    ]
    views = tuple(torch.empty(shape, dtype=getattr(torch, pixels.batch_type), device=META) for shape in groups)
    labels, valid = torch.zeros((images, 1), dtype=torch.int64), torch.ones(images, dtype=torch.bool)
    targets = torch.zeros(images, len(config.data.target_names))
    batch = Batch(views, labels, valid, np.arange(images), np.zeros(images, np.int64), targets)
    batch.drawn.update(objective.draw(batch, training=True))
    found = objective.inputs(batch, META, None)
    return found._replace(views=tuple(view.to(dtype) for view in found.views))


def begin_step(objective: "Objective") -> None:
    """What is called around the first step of a run, so that a plan, too, fails for an objective that reads what it may
    not.
    """
    objective.before_step(0)
    if objective.teacher is not None:
        objective.teacher_momentum(0)


@remembered
def training_flops(cls: type["Objective"], config: RunConfig, model: Config) -> int:
    """Floating-point operations of training on one image: of matrix products and convolutions, forward and backward.

    They are those that `loss` does and that its gradient does: all views, what is added, and a teacher's forward pass
    alone. Recomputed activations do not count.
    """
    return of_depth(model, partial(_flops, cls, config), config.train.freeze)


def _flops(cls: type["Objective"], config: RunConfig, model: Config) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    objective = make(cls, config, model, torch.float32)
    read = inputs(objective, config, _IMAGES, torch.float32)
    begin_step(objective)
    with FlopCounterMode(display=False) as counter:
        objective(*read)[0].backward()
    return counter.get_total_flops() // _IMAGES
