"""Predicts how long a step takes: arithmetic and memory traffic, collectives, and the optimizer.

Collectives are those of DeepSpeed 0.19.8 with the settings of train/zero/engine.py, counted in real steps
(tests/multiprocess/test_rank_communication.py). Below stage 3 overlap of communication is off: nothing is hidden behind the backward pass.

Letters: P parameters, p = P / ranks, e bytes of a parameter (fp32 4, 16 bits 2).
"""

import math
from dataclasses import dataclass, fields

from pipeline import objectives
from pipeline.estimate import memory
from pipeline.estimate.cluster import Cluster
from pipeline.estimate.network import Kind, Network, find_network
from pipeline.estimate.operators import MATRICES, traffic
from pipeline.estimate.plan import Plan
from pipeline.model import Config, training_flops_per_image
from pipeline.monitor.gpus import Gpu, find_gpu
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.run import RunConfig

# Share of the data sheet's FLOP/s and memory bandwidth that kernels reach. An assumption: see docs/plan.md.
EFFICIENCY = 0.6
# A kernel that PyTorch launches without compiling takes the host at least so many seconds. A rule of thumb, not measured.
_LAUNCH = 5e-6
# Stage 3 keeps a gathered parameter when it is used again before so many others: DeepSpeed's stage3_max_reuse_distance.
REUSE_DISTANCE = 1_000_000_000


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in a step: bytes of full tensors, all calls together. when: the part of the step."""

    kind: Kind
    bytes: int
    calls: int
    when: str  # "forward", "backward", "backward's end" or "step"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. communication: all collectives; exposed: what of them nothing hides."""

    compute: float
    optimizer: float
    communication: float
    exposed: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.optimizer


def step_time(
    config: PlanConfig, model: Config, cluster: Cluster, network: Network, micro_batch: int, accumulation: int
) -> StepTime:
    """Returns the time of an optimizer step of `accumulation` micro-batches on every rank."""
    gpu, num_gpus = cluster.gpu, cluster.num_gpus
    forward, backward = passes(config, model, gpu, micro_batch)
    compute = accumulation * (forward + backward)
    optimizer = optimizer_bytes(config, model, num_gpus, accumulation) / (gpu.bandwidth * EFFICIENCY)
    # Adam's arithmetic hides behind its traffic: some 15 operations for 28 bytes, and GPUs do about 10 or more in fp32 for each byte.
    # Muon's does not: it multiplies each matrix, on one rank but for those that are cut.
    if config.optimizer.name == "muon":
        peak = (config.engine.peak_tflops or gpu.tflops) * 1e12 * EFFICIENCY
        ranks = num_gpus if config.engine.zero_stage else 1
        optimizer += memory.parameters(config, model).orthogonal_flops / (ranks * peak)
    spent = dict.fromkeys(("forward", "backward", "backward's end", "step"), 0.0)
    if num_gpus > 1:
        for one in collectives(config, model, accumulation):
            spent[one.when] += network.seconds(one.kind, one.bytes, cluster.nodes, cluster.gpus_per_node, one.calls)
    exposed = spent["backward's end"] + spent["step"]
    exposed += max(0.0, spent["forward"] - accumulation * forward)
    exposed += max(0.0, spent["backward"] - accumulation * backward)
    return StepTime(compute, optimizer, sum(spent.values()), exposed)


def predicted_speed(config: RunConfig, plan: Plan, model: Config, gpu_name: str, gpus_per_node: int) -> float:
    """Images/s of a whole run on GPUs with this CUDA name, in the usual server of such a GPU; 0 if their speed is not known."""
    gpu = find_gpu(gpu_name)
    planned = PlanConfig(**{field.name: getattr(config, field.name) for field in fields(config)})
    if gpu is None or not is_predictable(planned):
        return 0.0
    cluster = Cluster(max(1, plan.world_size // gpus_per_node), min(gpus_per_node, plan.world_size), gpu)
    time = step_time(planned, model, cluster, find_network("", gpu), plan.micro_batch, plan.accumulation)
    return plan.global_batch / time.total


def passes(config: PlanConfig, model: Config, gpu: Gpu, micro_batch: int) -> tuple[float, float]:
    """Seconds of the forward and the backward pass of one micro-batch on one GPU.

    Each class of operators takes the time of its arithmetic or of its memory traffic, whichever is longer, at
    `EFFICIENCY` of the data sheet's rates; and a kernel cannot start before it is launched. `measured` replaces this.
    That is of the model on one view; an objective with more views, additions or a teacher takes longer as its arithmetic is more.
    Attention's arithmetic is counted with the matrix products. The peak must be known (`is_predictable`).
    """
    if config.measured:  # With the recomputation of activations, if there is one.
        seconds = micro_batch / config.measured
        return seconds / 3, seconds * 2 / 3
    peak = (config.engine.peak_tflops or gpu.tflops) * 1e12
    work = objectives.training_flops(config, model) / training_flops_per_image(model)
    flops = training_flops_per_image(model) * micro_batch * work
    found = []
    for part, share in zip(
        traffic(model, micro_batch, memory.dtype_of(config.engine.precision)), (1 / 3, 2 / 3), strict=True
    ):
        seconds = sum(
            max(count * work / gpu.bandwidth, flops * share / peak if kind == MATRICES else 0.0)
            for kind, count in part.bytes.items()
        )
        found.append(max(seconds / EFFICIENCY, part.kernels * work * _LAUNCH))
    forward, backward = found
    return forward, backward + forward * config.engine.activation_checkpointing


def is_predictable(config: PlanConfig) -> bool:
    """Whether the speed of a GPU is known: data sheets' fp32 peaks are not in the table."""
    return bool(config.measured or config.engine.peak_tflops) or config.engine.precision != "fp32"


def collectives(config: RunConfig, model: Config, accumulation: int) -> list[Collective]:
    """Collectives of a step, without the few bytes of norms and flags. The moving average of the weights needs none."""
    stage, e = config.engine.zero_stage, memory.dtype_of(config.engine.precision).itemsize
    found = memory.parameters(config, model)
    P = found.trained
    bucket = memory.reduce_bucket(P)
    buckets = math.ceil(P / bucket)
    if stage == 0:
        return [Collective("all-reduce", e * P, buckets, "backward's end")]
    if stage < 3:
        # Stage 1 reduces once a step, stage 2 after every micro-batch; both by all-reduce, though a rank keeps only its part.
        times = accumulation if stage == 2 else 1
        # At most: on many ranks every matrix is cut.
        cut = 4 * found.matrices if config.optimizer.name == "muon" else 0
        return [
            Collective("all-reduce", times * e * P, times * buckets, "backward's end"),
            Collective("all-gather", e * P, 2, "step"),  # one call for each parameter group
            *([Collective("all-reduce", cut, 1, "step")] if cut else []),
        ]
    kept, tensors = found.persistent, found.sharded_tensors
    sharded = P - kept
    # A parameter is used again in the backward pass; between lie twice the parameters behind it.
    again = max(0, sharded - REUSE_DISTANCE // 2)
    last = P - (buckets - 1) * bucket  # Nothing of the backward pass is left while the last bucket is reduced.
    return [
        Collective("all-gather", accumulation * e * sharded, accumulation * tensors, "forward"),
        Collective(
            "all-gather",
            accumulation * e * again,
            accumulation * math.ceil(tensors * again / max(sharded, 1)),
            "backward",
        ),
        Collective("reduce-scatter", accumulation * e * (P - last), accumulation * (buckets - 1), "backward"),
        Collective("reduce-scatter", accumulation * e * last, accumulation, "backward's end"),
        Collective("all-gather", e * kept, 1, "step"),
    ]


def optimizer_bytes(config: RunConfig, model: Config, world_size: int, accumulation: int) -> int:
    """Memory traffic of a rank's optimizer step, each tensor read and written once: a fused optimizer (engine.fused)."""
    stage, e = config.engine.zero_stage, memory.dtype_of(config.engine.precision).itemsize
    P = memory.parameters(config, model).trained
    p = P if stage == 0 else math.ceil(P / world_size)
    # fp32 gradients of the whole model stay on every rank at stage 0, and at stage 1 in bf16.
    held = P if stage == 0 or (stage == 1 and config.engine.precision == "bf16") else p
    gradients = held * (8 + e) * (accumulation if e == 2 or accumulation > 1 else 0)  # added up in fp32
    gradients += held * (4 + 8 + 4)  # norm, clipping, zeroing
    # Gradient read; weights, moments and moving average read and written (the latter reads the weights).
    states = 2 if config.optimizer.name != "sgd" else int(bool(config.optimizer.momentum))
    update = 4 + 8 * (1 + states) + 12 * bool(config.optimizer.ema_decay)
    return gradients + p * (update + (4 + e if e == 2 else 0))
