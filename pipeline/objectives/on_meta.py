"""An objective on the meta device, where tensors have shapes but no memory: its loss runs there to count memory and arithmetic.

Nothing waits for a device and nothing is computed, so `loss` must choose no shape by a value.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeline.data.loading.loader import Batch
from pipeline.model import Config, ViTConfig, build
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig

if TYPE_CHECKING:
    from pipeline.objectives.objective import Inputs, Objective

META = torch.device("meta")
T = TypeVar("T")
_IMAGES = 4  # of a micro-batch whose arithmetic is counted


@cache
def shallow(config: Config) -> tuple[Config, Config, int] | None:
    """Returns models of depth 2 and 3, and how much deeper than the first the model is; None unless it is a ViT
    deeper than both, and without a stem, which takes longer than its blocks.

    All blocks but the first are alike, so what each adds to a count is the difference of the two; counting all 56 takes seconds.
    """
    if not isinstance(config, ViTConfig) or config.has_stem or config.depth <= 3:
        return None
    return replace(config, depth=2), replace(config, depth=3), config.depth - 2


def remembered(function: Callable[..., T]) -> Callable[..., T]:
    """A cache of a function of (objective's class, config, more): a RunConfig is not hashable.

    Settings of the engine and of the micro-batch are no part of the key: what depends on them is in `more`.
    """
    known: dict[Any, T] = {}

    @wraps(function)
    def found(cls: type["Objective"], config: RunConfig, *more: Any) -> T:
        train = config.train
        trained = [train.loss, train.freeze, train.lora_rank, train.lora_layers]
        key = (cls, repr([*trained, config.objective, config.model, config.augment, config.seed]), *more)
        if key not in known:
            known[key] = function(cls, config, *more)
        return known[key]

    return found


def make(cls: type["Objective"], config: RunConfig, model: Config, dtype: torch.dtype) -> "Objective":
    """The objective on the meta device, in training mode, with parameters of `dtype`; buffers stay as they are."""
    with META:
        objective = cls.of(config, build(model))
    return cast(objective, dtype)


def cast(objective: "Objective", dtype: torch.dtype) -> "Objective":
    """The objective with parameters of `dtype`, as the engine has it: buffers stay as they are. In training mode."""
    for parameter in objective.parameters():
        parameter.data = parameter.data.to(dtype)
    return objective.train()


def inputs(objective: "Objective", config: RunConfig, images: int, dtype: torch.dtype) -> "Inputs":
    """What `loss` reads of a micro-batch of so many images, by the objective's own `inputs`; views of `dtype`."""
    groups = [(group.count, images, *ImageSize.parse(group.size), 3) for group in objective.views(config)]
    views = tuple(torch.empty(shape, dtype=torch.uint8, device=META) for shape in groups)
    labels, valid = torch.zeros((images, 1), dtype=torch.int64), torch.ones(images, dtype=torch.bool)
    batch = Batch(views, labels, valid, np.arange(images), np.zeros(images, np.int64))
    found = objective.inputs(batch, META, None)
    return found._replace(views=tuple(view.to(dtype) for view in found.views))


def loss(objective: "Objective", read: "Inputs") -> Tensor:
    """The loss of one rank: of as many as `across_ranks.on_meta` says."""
    objective.before_step(0, 1)
    return objective(*read)[0]


class QuickNorms(TorchFunctionMode):
    """Within it, every LayerNorm is a quick one."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return quick_layer_norm(args, kwargs) if func is F.layer_norm else func(*args, **(kwargs or {}))


def quick_layer_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """For F.layer_norm on the meta device, where PyTorch composes it in Python of some 20 operators: a fifth of a plan's time."""
    return _LayerNorm.apply(args[0], kwargs["weight"])


class _LayerNorm(torch.autograd.Function):
    """Saves its input, and the mean and standard deviation of each position in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        mean, deviation = (x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(2))
        ctx.save_for_backward(x, weight, mean, deviation)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


@remembered
def training_flops(cls: type["Objective"], config: RunConfig, model: Config) -> int:
    """Floating-point operations of training on one image: of matrix products and convolutions, forward and backward.

    They are those that `loss` does and that its gradient does: all views, what is added, and a teacher's forward pass alone.
    Recomputed activations do not count.
    """
    if not (found := shallow(model)):
        return _flops(cls, config, model)
    *models, deeper = found
    two, three = (_flops(cls, config, one) for one in models)
    return two + deeper * (three - two)


def _flops(cls: type["Objective"], config: RunConfig, model: Config) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    objective = make(cls, config, model, torch.float32)
    read = inputs(objective, config, _IMAGES, torch.float32)
    with FlopCounterMode(display=False) as counter, QuickNorms():
        loss(objective, read).backward()
    return counter.get_total_flops() // _IMAGES
