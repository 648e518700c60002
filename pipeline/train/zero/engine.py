"""A model trained under ZeRO by DeepSpeed; everything specific to DeepSpeed is in this folder.

Two faults are avoided, each with a test: accumulating gradients in bf16, and ZeRO configurations that train incorrectly
(the settings refuse them).
"""

import atexit
import contextlib
import datetime
import io
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import distributed_c10d

from pipeline.base import random_numbers
from pipeline.base.errors import Stopped
from pipeline.base.random_numbers import Purpose
from pipeline.checkpoint.sharded_tensors import EMA, WEIGHTS, Range, RankPart, ShardedTensors
from pipeline.checkpoint.store import Counters
from pipeline.data.loading.loader import Batch, normalise
from pipeline.estimate import memory
from pipeline.estimate.plan import Plan
from pipeline.model.resnet import PreActivationUnit, Stem
from pipeline.model.vit import Block, DropPath
from pipeline.monitor.profile import StepClock
from pipeline.objectives.objective import Inputs, Objective, constants, stored_name, trained_parameters
from pipeline.objectives.parameters import optimizers
from pipeline.objectives.parameters.muon import Muon
from pipeline.process.distributed import START_MINUTES, Ranks, all_started, seed_torch
from pipeline.settings.run import EngineConfig, OptimizerConfig
from pipeline.train.zero import internals
from pipeline.train.zero.internals import OptimizerShard, deepspeed

_FIRST_SCALE_POWER = 12
_LET_GO_SECONDS = 0.02
# Of compiled blocks: one for each shape, in training and in evaluation.
_MAX_GRAPHS = 64


def start_ranks(
    ranks: Ranks, minutes: float = START_MINUTES, meet: Callable[[bool], None] = lambda hosts_store: None
) -> None:
    """Initialise the process group; must precede any collective. No-op if it is initialised.

    minutes: timeout of a collective call. meet: see `all_started`. Raises CrashError if a rank does not start.
    """
    if distributed.is_initialized():
        return
    deepspeed.utils.set_log_level_from_string("warning")
    # Its warning of optimizers that it did not test; ours are tested here (see `deepspeed_settings`).
    deepspeed.utils.logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    with all_started(ranks, meet), contextlib.redirect_stdout(io.StringIO()):  # Its settings.
        deepspeed.init_distributed(timeout=datetime.timedelta(minutes=minutes), auto_mpi_discovery=False)
    if distributed.get_backend() == "gloo":
        atexit.register(_leave_gloo)


def limit_collectives(minutes: float) -> None:
    """Set the timeout of the collective calls of all process groups.

    DeepSpeed makes groups of its own, with torch's default instead of the one of `start_ranks`: 10 minutes with NCCL,
    30 with gloo.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=minutes), group)


def _leave_gloo() -> None:
    """Destroy the process group: otherwise gloo's threads abort the interpreter at exit (code -6) when another rank has
    exited before.
    """
    distributed.destroy_process_group()
    # They say that a collective call has ended before they let go of its tensors, and the same happens if Python has
    # begun to end by then.
    time.sleep(_LET_GO_SECONDS)


class Ema:
    """mean = momentum * mean + (1 - momentum) * weights after every step that is not skipped; starts as the weights."""

    def __init__(self, shards: list[OptimizerShard]) -> None:
        self.weights = [shard.weights.detach() for shard in shards]
        self.mean: list[Tensor] = []
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Reset the mean to the current weights."""
        self.mean = [weights.clone() for weights in self.weights]

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        for mean, weights in zip(self.mean, self.weights, strict=True):
            mean.lerp_(weights, 1 - momentum)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange mean and weights bit for bit; a second call restores both."""
        for mean, weights in zip(self.mean, self.weights, strict=True):
            kept = weights.clone()
            weights.copy_(mean)
            mean.copy_(kept)


class Teacher:
    """The objective's teacher: frozen parameters in the precision of training, copied from the sharded fp32 average.

    At stages 0 and 3 a rank copies what it holds. At stages 1 and 2 it holds a part of the average and the whole
    teacher: then the teacher's parameters are views of flat tensors that are laid out as DeepSpeed's, and one
    collective call fills each.
    """

    def __init__(self, engine: Any, ema: Ema, shards: list[OptimizerShard], ranks: Ranks) -> None:
        self.ema, self.ranks = ema, ranks
        self.flats: list[Tensor] = []
        # (part of the teacher, number of the shard, first element in its mean), where no communication is needed.
        self.parts: list[tuple[Tensor, int, int]] = []
        # Stage 3: small parameters, which every rank holds.
        self.persistent: list[Any] = []
        # What is frozen is the backbone's own.
        averaged = {stored_name(name) for name, _ in trained_parameters(engine.module)}
        named = ((stored_name(name), parameter) for name, parameter in engine.module.teacher.named_parameters())
        parameters = {name: parameter for name, parameter in named if name in averaged}
        stage = engine.zero_optimization_stage()
        if stage in (1, 2):
            self._lay_out(shards, parameters)
            return
        for i, shard in enumerate(shards):
            for place in shard.places:
                if (parameter := parameters.get(place.name)) is not None:
                    held = internals.held_by(parameter).view(-1)[: place.length]
                    self.parts.append((held, i, place.offset))
        if stage == 3:
            ours = set(map(id, parameters.values()))
            self.persistent = [p for p in internals.persistent(engine) if id(p) in ours]

    def _lay_out(self, shards: list[OptimizerShard], parameters: dict[str, nn.Parameter]) -> None:
        """Make the parameters views of `self.flats`."""
        places = self.ranks.gather(
            [[(place.name, place.offset - place.start) for place in shard.places] for shard in shards]
        )
        some = next(iter(parameters.values()))
        for i, shard in enumerate(shards):
            length = shard.weights.numel()
            flat = torch.empty(length * self.ranks.world_size, dtype=some.dtype, device=some.device)
            self.flats.append(flat)
            begins = {
                name: rank * length + offset for rank, of_rank in enumerate(places) for name, offset in of_rank[i]
            }
            for name in begins.keys() & parameters.keys():
                parameter = parameters[name]
                view = flat[begins[name] : begins[name] + parameter.numel()].view(parameter.shape)
                view.copy_(parameter.data)
                parameter.data = view

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the average to the teacher. Collective at stages 1 and 2, and for small parameters at stage 3."""
        for flat, mean in zip(self.flats, self.ema.mean, strict=bool(self.flats)):
            own = flat.view(-1, mean.numel())[self.ranks.rank]
            own.copy_(mean)
            if self.ranks.world_size > 1:
                distributed.all_gather_into_tensor(flat, own)
        for held, i, offset in self.parts:
            held.copy_(self.ema.mean[i][offset : offset + held.numel()])
        internals.gather_persistent(self.persistent)


class Engine:
    """An objective under ZeRO: loss, backward and step over micro-batches, and this rank's part of a checkpoint."""

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        config: EngineConfig,
        optimizer_config: OptimizerConfig,
        plan: Plan,
        ranks: Ranks,
        seed: int,
        clock: StepClock,
    ) -> None:
        self.objective = objective
        saved = chain(trained_parameters(objective), constants(objective))
        self.shapes = {stored_name(name): list(tensor.shape) for name, tensor in saved}
        self.ranks, self.seed, self.stage, self.clock = ranks, seed, config.zero_stage, clock
        self.optimizer_config, self.num_steps = optimizer_config, plan.steps
        self.ema: Ema | None = None
        self.teacher: Teacher | None = None
        self.client = optimizer  # Whose state DeepSpeed's optimizer keeps.
        self._step = 0
        self._skipped_before = 0  # Steps skipped before this one.
        self._norm: float | None = None  # This step's gradient norm at stage 0.
        self._training: bool | None = None  # What _set_mode set.
        self.dtype = memory.dtype_of(config.precision)
        num_trained = sum(parameter.numel() for _, parameter in trained_parameters(objective))
        num_parameters = sum(parameter.numel() for parameter in objective.parameters())
        self.settings = deepspeed_settings(config, optimizer_config, plan, num_trained, num_parameters)
        internals.restore_linear()
        blocks = [part for part in objective.modules() if isinstance(part, Block | PreActivationUnit | Stem)]
        if config.compile:
            internals.gather_at_once(blocks)
        with contextlib.redirect_stdout(io.StringIO()):
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=objective, optimizer=optimizer, config=self.settings, dist_init_required=False
            )
        internals.use_flat_gradients(self.engine)
        self.shards = internals.shards(self.engine, ranks.rank)
        if isinstance(optimizer, Muon) and self.stage:
            optimizer.lay_out({shard.key: shard.places for shard in self.shards}, ranks.gather)
        if config.compile:
            compile_blocks(blocks, config.deterministic, ranks.device)
        if optimizer_config.ema_decay or objective.teacher is not None:
            self.ema = Ema(self.shards)
            if objective.teacher is not None:
                self.teacher = Teacher(self.engine, self.ema, self.shards, ranks)

    # ------------------------------------------------------------------ interface of `training_step` (loop.Trainer)
    def begin_step(self, step: int, lr: float) -> None:
        """Set training mode and the rates of step `step` (from 0). lr: before the factors of parameter groups."""
        self._step, self._skipped_before, self._norm = step, self.skipped_steps, None
        self._set_mode(training=True)
        optimizers.set_rates(
            self.optimizer, step, lr, optimizers.weight_decay(self.optimizer_config, step, self.num_steps)
        )
        self.objective.before_step(step)

    def seed_dropout(self, micro_batch: int) -> None:
        """Seed torch from (seed, step, rank, micro-batch), so that a resumed run draws the same numbers."""
        seed = random_numbers.torch_seed(self.seed, Purpose.DROPOUT, self._step, self.ranks.rank, micro_batch)
        seed_torch(seed, self.clock.on_gpu)

    def loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective's loss and values, in the precision of training. Collective at stage 3."""
        return self.engine(tuple(view.to(self.dtype) for view in inputs.views), inputs.facts)

    def backward(self, loss: Tensor, share: float) -> None:
        """Add the gradient of a micro-batch. share: ignored, because DeepSpeed weighs all micro-batches alike."""
        self.engine.backward(loss)

    def update(self, is_last: bool) -> None:
        """Count a micro-batch; after the last, DeepSpeed reduces and clips the gradient and steps. Collective."""
        if is_last and self.stage == 0:
            self._norm = self._guard_gradient()
        self.engine.step()

    def end_step(self) -> Tensor | float:
        """Return the gradient norm before clipping, NaN if DeepSpeed has none. Collective.

        Unless the step was skipped, update the EMA, the teacher and the objective's state first. The norm may be a
        scalar on the device, to be read before the next step: reading it waits for the device.
        """
        if self.skipped_steps == self._skipped_before:
            if self.ema:
                decay = self.optimizer_config.ema_decay
                self.ema.update(self.objective.teacher_momentum(self._step) if self.teacher else decay)
            if self.teacher:
                self.teacher.refresh()
            self.objective.after_step()
        norm = self.engine.get_global_grad_norm() if self._norm is None else self._norm
        return math.nan if norm is None else norm

    def _guard_gradient(self) -> float:
        """Stage 0: clip the reduced gradient, or drop it if it is non-finite. Returns its norm before clipping.

        DeepSpeed does this at the other stages. The optimizer skips parameters without a gradient.
        """
        parameters = [p for p in self.engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        read = float(norm)  # The only wait for the device in a step.
        if not math.isfinite(read):
            for parameter in parameters:
                parameter.grad = None
            self.engine.skipped_steps += 1
        elif self.optimizer_config.clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.optimizer_config.clip, norm)
        return read

    @contextmanager
    def untouched(self, num_micro_batches: int) -> Iterator[None]:
        """Context for a dry run of one step of this many micro-batches at a learning rate of 0. Collective.

        For use before training or loading. On exit, weights, buffers, counters, loss scale and torch's random state are
        restored, and the optimizer's state is zeros, as its first step would create it.
        """
        counters = self.counters()
        buffers = {buffer: buffer.clone() for buffer in self.objective.buffers()}
        # DeepSpeed steps when this counter reaches a multiple of gradient_accumulation_steps.
        self.engine.micro_steps = self.engine.gradient_accumulation_steps() - num_micro_batches
        with torch.random.fork_rng([self.ranks.device] if self.clock.on_gpu else []):
            yield
        for buffer, value in buffers.items():
            buffer.copy_(value)
        for state in self.client.state.values():
            for value in state.values():
                if torch.is_tensor(value):  # In place: DeepSpeed's parameters hold views of them.
                    value.zero_()
        self._count_on(counters)
        self.clock.read()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return the backbone's output, float32 (B, K), of a batch's images (B, S, S, C), in evaluation mode.
        Collective at stage 3.
        """
        self._set_mode(training=False)
        return self.engine(
            (normalise(images, self.ranks.device, self.dtype, self.objective.pixels),), {}, task="backbone"
        ).float()

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, Tensor]:
        """Return what the objective measures of each image of a batch, (B,) by name. Collective at stage 3."""
        self._set_mode(training=False)
        views, facts = self.objective.inputs(batch, self.ranks.device, None)
        return self.engine(tuple(view.to(self.dtype) for view in views), facts, task="measure")

    def _set_mode(self, training: bool) -> None:
        """Set training or evaluation mode where it changes: it visits every module, 2 ms each step of a small model on
        a fast core.
        """
        if self._training != training:
            self.engine.train(training)
            self._training = training

    def features(self, images: Tensor) -> Tensor:
        """Return the head's input, float32 (B, D), of a batch's images (B, S, S, C), in evaluation mode. Collective at
        stage 3.
        """
        # Runs the whole model: at stage 3 parameters are only gathered inside its forward pass.
        read: list[Tensor] = []
        hook = self.objective.backbone.head.register_forward_pre_hook(lambda head, inputs: read.append(inputs[0]))
        try:
            output = self.forward(images)
        finally:
            hook.remove()
        return (read[0] if read else output).float()  # A MaskedViT reads whole images without its head.

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model uses the EMA of its weights, if enabled. Collective."""
        if self.ema is None:
            yield
            return
        self._swap(self.ema)
        try:
            yield
        except Stopped:  # On all ranks; the trained weights are saved next.
            self._swap(self.ema)
            raise
        self._swap(self.ema)

    def _swap(self, ema: Ema) -> None:
        ema.swap()
        internals.publish(self.engine)

    def part(self) -> RankPart:
        """Return this rank's part of a checkpoint: live tensors, to be copied before the next step."""
        ranks, places = self.ranks, []
        for i, shard in enumerate(self.shards):
            for place in shard.places:
                if self.stage == 0:
                    place = place.share(ranks.rank, ranks.world_size)
                if place.length:
                    places.append((i, place))
        constant = list(internals.constant_parts(self.engine, ranks.rank, ranks.world_size, all_ranks=False))
        return RankPart(
            [(place.name, place.start, place.length) for _, place in places],
            {
                name: [flats[i].detach().narrow(0, place.offset, place.length) for i, place in places]
                for name, flats in self._states().items()
            },
            [(name, start, tensor.numel()) for name, start, tensor in constant],
            [tensor for _, _, tensor in constant],
        )

    def counters(self) -> Counters:
        """Return the counters to save with the tensors; the same on every rank."""
        states = [self.client.state.get(shard.key, {}) for shard in self.shards]
        steps = {int(state["step"]) for state in states if "step" in state}  # None with SGD.
        assert len(steps) < 2, steps
        done = steps.pop() if steps else None
        return Counters(done, int(self.engine.global_steps), self.skipped_steps, internals.loss_scale(self.engine))

    @torch.no_grad()
    def load(self, sharded: ShardedTensors, counters: Counters) -> None:
        """Load a checkpoint saved by any number of ranks at any stage; each rank reads only its own ranges. Collective.

        Raises UserError if it belongs to another model.
        """
        sharded.check(self.shapes)
        for shard in self.shards:  # Create the states that the optimizer creates at its first step, to load into.
            state = self.client.state[shard.key]
            for name in sharded.states:
                if name not in (WEIGHTS, EMA) and name not in state and not self._lacks(shard, name):
                    state[name] = torch.zeros_like(shard.key)
            if counters.optimizer_steps is not None and not self._lacks(shard, "step"):
                # A fused kernel reads it where the weights are; torch's other optimizers count on the host.
                fused = any(group.get("fused") for group in self.client.param_groups)
                device = shard.key.device if fused else "cpu"
                state["step"] = torch.tensor(float(counters.optimizer_steps), device=device)
        for name, flats in self._states().items():
            if name in sharded.states:
                _fill(
                    sharded,
                    name,
                    [
                        (place.name, place.start, flat.narrow(0, place.offset, place.length))
                        for flat, shard in zip(flats, self.shards, strict=True)
                        if not self._lacks(shard, name)
                        for place in shard.places
                    ],
                )
        constant = internals.constant_parts(self.engine, self.ranks.rank, self.ranks.world_size, all_ranks=True)
        _fill(sharded, WEIGHTS, constant)
        internals.publish(self.engine)
        if self.ema and EMA not in sharded.states:
            self.ema.begin()  # The EMA was enabled after this checkpoint.
        if self.teacher:
            self.teacher.refresh()
        self._count_on(counters)

    def _states(self) -> dict[str, list[Tensor]]:
        """Return live flat tensors by state, one per shard: the weights, their average, and the optimizer's states that
        exist so far. What a shard lacks is zeros without memory.
        """
        shards, states = self.shards, self.client.state
        found = {WEIGHTS: [shard.weights for shard in shards]}
        most = max(shards, key=lambda shard: len(states.get(shard.key, {})))
        for key, value in states.get(most.key, {}).items():
            if torch.is_tensor(value) and value.numel() == most.weights.numel() and key != "step":
                found[key] = [
                    torch.zeros((), device=shard.weights.device).expand(shard.weights.numel())
                    if self._lacks(shard, key)
                    else states[shard.key][key].view(-1)
                    for shard in shards
                ]
        return found | {EMA: self.ema.mean} if self.ema else found

    def _lacks(self, shard: OptimizerShard, state: str) -> bool:
        """Whether the optimizer keeps no such state of a shard: Muon has no second moment."""
        return state in ("exp_avg_sq", "step") and any(
            group.get("matrices") and any(p is shard.key for p in group["params"]) for group in self.client.param_groups
        )

    def _count_on(self, counters: Counters) -> None:
        self.engine.global_steps = counters.global_steps
        self.engine.skipped_steps = counters.skipped_steps
        if self.dtype == torch.float16 and counters.loss_scale:
            internals.set_loss_scale(self.engine, counters.loss_scale)

    @property
    def skipped_steps(self) -> int:
        return int(self.engine.skipped_steps)


def _fill(sharded: ShardedTensors, state: str, targets: Iterable[tuple[str, int, Tensor]]) -> None:
    """Fill flat tensors from a checkpoint. targets: (name, first element, tensor)."""
    wanted = [(flat, Range(state, name, start, np.empty(flat.numel(), np.float32))) for name, start, flat in targets]
    sharded.read(part for _, part in wanted)
    for flat, part in wanted:
        flat.copy_(torch.from_numpy(part.out))


def deepspeed_settings(
    config: EngineConfig, optimizer: OptimizerConfig, plan: Plan, num_trained: int, num_parameters: int
) -> dict[str, Any]:
    """Generate DeepSpeed's configuration for a run. num_parameters: with frozen ones."""
    ahead, kept = memory.live_parameters(num_parameters)
    settings: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": optimizer.clip if config.zero_stage else 0.0,  # Stage 0: see _guard_gradient.
        "zero_optimization": {
            "stage": config.zero_stage,
            "reduce_bucket_size": memory.reduce_bucket(num_trained),
            "stage3_param_persistence_threshold": memory.PERSISTENCE_THRESHOLD,
            "stage3_prefetch_bucket_size": ahead,
            "stage3_max_live_parameters": ahead + kept,  # Beyond, nothing is gathered ahead.
            "stage3_max_reuse_distance": 2 * kept,  # The way to the end of the model, and back.
            "memory_efficient_linear": not config.compile,  # See internals.restore_linear.
        },
        # torch's AdamW and SGD are not on DeepSpeed's list of tested optimizers; the tests compare them with plain
        # PyTorch.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        # It would wait for the GPU before each forward pass and after each micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
    if config.offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if config.precision != "fp32":
        settings[config.precision] = {"enabled": True}
        # DeepSpeed would accumulate in 16 bits, which loses small gradients.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        if config.zero_stage == 1 and plan.accumulation > 1:
            # DeepSpeed would reduce the accumulated gradients in 16 bits. (Those of one micro-batch, which stages 2 and
            # 3 reduce, have 16 bits.)
            settings["communication_data_type"] = "fp32"
    if config.precision == "fp16":
        # DeepSpeed's default is 2^16; if that overflows, each halving costs two skipped steps. The scale grows when it
        # can.
        settings["fp16"] |= {"loss_scale": 0, "initial_scale_power": _FIRST_SCALE_POWER}
    return settings


def compile_blocks(blocks: Iterable[nn.Module], deterministic: bool, device: torch.device) -> None:
    """Compile each block by itself, at its first call with each shape; blocks with the same shapes share their code.

    deterministic: choose nothing by timing that changes bits, so that another process makes the same code. A block that
    cannot be compiled in one piece, or that was compiled for too many shapes, raises an error.
    """
    # As options, because torch keeps what is set in its configuration for the thread that sets it, and compiles the
    # backward pass in another one. Inductor's kernel for the sums over rows and over columns of a norm's gradient
    # silently drops what should go into a part of a larger tensor (torch 2.10 to 2.13, pytorch issue 193061).
    options: dict[str, Any] = {"deterministic": deterministic, "triton.mix_order_reduction": False}
    for block in blocks:
        for part in block.modules():
            # From the host it would be copied in each call.
            if isinstance(part, DropPath) and part.share_kept is not None:
                part.share_kept = part.share_kept.to(device)
        # dynamic=False: torch would make code for any shape when it sees a second one, and the bits of a step would
        # depend on what the process computed before. Not `block.compile`, which would compile DeepSpeed's hooks too.
        block.forward = torch.compile(  # type: ignore[call-overload]  # Its overloads lack recompile_limit.
            block.forward, dynamic=False, fullgraph=True, recompile_limit=_MAX_GRAPHS, options=options
        )
