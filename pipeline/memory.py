"""Bytes that one rank holds while it trains, worked out from the settings: what fits a GPU, before there is one.

Counted as DeepSpeed 0.19.8 allocates, read in its source and compared with the tensors of real runs
(tests/multiprocess/test_rank_memory.py). Three moments of a step can be the fullest: the backward pass while all activations
are there, the reduction of gradients over ranks, the optimizer step. The peak is the largest of them.

Not counted: the CUDA context, NCCL's own buffers, the allocator's gaps, what a kernel takes inside itself.

Letters: P parameters of the model, p = P / ranks, e bytes of a parameter (fp32 4, bf16 2), T tokens of a micro-batch.
"""

import math
from dataclasses import dataclass

from pipeline.config import EngineConfig, OptimizerConfig, Precision, RunConfig
from pipeline.model import ViTConfig, num_parameters

# Of DeepSpeed's buffers, in elements; its defaults, which engine.py writes into its settings.
REDUCE_BUCKET = 500_000_000
PERSISTENCE_THRESHOLD = 100_000  # stage 3: parameters below this stay whole on every rank
MAX_LIVE_PARAMETERS = 1_000_000_000  # stage 3: no more are gathered at a time


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at one moment of a step."""

    when: str  # "backward", "reduction" or "optimizer step"
    weights: int
    optimizer: int  # fp32 master weights and moments
    gradients: int
    activations: int  # kept for the backward pass, and what that works in
    inputs: int
    buffers: int  # of communication, and what the optimizer works in

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.inputs + self.buffers


def rank_memory(model: ViTConfig, config: RunConfig, micro_batch: int, accumulation: int, world_size: int) -> Memory:
    """The fullest moment of a step."""
    return max(moments(model, config, micro_batch, accumulation, world_size), key=lambda moment: moment.total)


def moments(model: ViTConfig, config: RunConfig, micro_batch: int, accumulation: int, world_size: int) -> list[Memory]:
    """A rank's bytes in the backward pass, the reduction of gradients and the optimizer step."""
    engine = config.engine
    e = _element(engine.precision)
    P = num_parameters(model)
    p = math.ceil(P / world_size)
    full = _backward_activations(model, micro_batch, engine)
    # A bucket that the gradients overflow is reduced before the backward pass is done.
    left = int(full * max(0.0, 1 - REDUCE_BUCKET / P)) if engine.zero_stage >= 2 else 0
    inputs = input_bytes(model, micro_batch, engine.precision)
    state = _moments_bytes(config.optimizer)
    optimizer = state * P if engine.zero_stage == 0 else (4 + state) * p
    weights = e * P
    gathered = e * P
    if engine.zero_stage == 3:
        # Parameters are gathered as they are used, and stay for the backward pass while there is room for more.
        weights, gathered = e * (p + _persistent(model)), e * (p + min(P, MAX_LIVE_PARAMETERS))
    gradients, buffers = _gradients_and_buffers(model, config, accumulation > 1, world_size)
    return [
        Memory("backward", gathered, optimizer, gradients[0], full, inputs, buffers[0]),
        Memory("reduction", gathered, optimizer, gradients[1], left, inputs if left else 0, buffers[1]),
        Memory("optimizer step", weights, optimizer, gradients[2], 0, 0, buffers[2]),
    ]


def _gradients_and_buffers(
    model: ViTConfig, config: RunConfig, accumulates: bool, world_size: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Bytes of gradients, and of buffers, in the backward pass, the reduction and the optimizer step."""
    stage, e = config.engine.zero_stage, _element(config.engine.precision)
    P = num_parameters(model)
    p = math.ceil(P / world_size)
    # The two parameter groups are stepped one after the other; this is the larger.
    group = math.ceil((P - _undecayed(model)) / (1 if stage == 0 else world_size))
    work = _optimizer_work(config.optimizer) * group
    fixed, copy = e * REDUCE_BUCKET, e * min(P, REDUCE_BUCKET)
    if stage == 0:
        return (4 * P * accumulates, 4 * P, 4 * P), (0, copy, work)
    if stage == 1 and e == 2:
        # DeepSpeed's BF16_Optimizer: fp32 gradients of the whole model on every rank, all through the run, and the
        # 16-bit ones beside them until the step. What is reduced is a flat fp32 copy, itself copied to 16 bits.
        return ((4 + e * accumulates) * P, (4 + e) * P, (4 + e) * P), (0, (4 + e) * P, work)
    # Elsewhere gradients move into a bucket of fixed size (stages 2, 3: as they come; stage 1: in the last micro-batch),
    # what is reduced is a flat copy of the bucket, and a rank keeps its own part of the sum.
    if stage == 1:
        return (4 * P * accumulates, max(0, 4 * (P - REDUCE_BUCKET)), 4 * p), (fixed, fixed + copy, 4 * group + work)
    if stage == 2 and e == 2:
        as_fp32 = 4 * _largest_parameter(model)
        return (4 * p * accumulates, 4 * p, 4 * p), (fixed, fixed + copy + as_fp32, work)
    if stage == 2:
        return (4 * p * accumulates, 4 * p * accumulates, 4 * p), (fixed, fixed + copy, 4 * group + work)
    as_fp32 = 4 * p if e == 2 else 0
    return (4 * p, 4 * p, 4 * p), (fixed, fixed + copy + as_fp32, fixed + 4 * group + work)


def _backward_activations(model: ViTConfig, micro_batch: int, engine: EngineConfig) -> int:
    saved = saved_activations(model, micro_batch, engine.precision, engine.activation_checkpointing)
    return saved + backward_work(model, micro_batch, engine.precision, engine.activation_checkpointing)


def saved_activations(model: ViTConfig, micro_batch: int, precision: Precision, checkpointing: bool) -> int:
    """Bytes that the forward pass of a micro-batch keeps for the backward pass, without its images.

    Attention is one fused operator (flash or memory-efficient): it keeps its inputs, its output and one fp32 number for
    each row of the N x N matrix, never the matrix.
    """
    e = _element(precision)
    T, D, K = micro_batch * model.num_tokens, model.width, model.num_classes
    masked = 1 if model.dropout else 0  # bytes of a dropout mask's element
    stream = e * T * D  # tokens between two blocks
    kept = stream if checkpointing else _block(model, micro_batch, precision)
    # After the blocks: tokens, their LayerNorm (all of it: the class token is a view of it), the two small layers.
    after = 2 * stream + 8 * T + micro_batch * (2 * e * D * bool(model.representation))
    # The loss works in fp32: logits, targets, and what comes of them.
    loss = micro_batch * K * (12 + (0 if e == 4 else e))
    return masked * T * D + model.depth * kept + after + loss


def backward_work(model: ViTConfig, micro_batch: int, precision: Precision, checkpointing: bool) -> int:
    """Bytes that the backward pass takes beside what was saved, when it begins: gradients of activations in the last
    block, and of its and the head's weights; with checkpointing, the activations of that block."""
    e = _element(precision)
    T, D, M, K = micro_batch * model.num_tokens, model.width, model.mlp_width, model.num_classes
    head = e * (D * K + D * D * bool(model.representation))
    again = _block(model, micro_batch, precision) if checkpointing else 0
    return e * T * (M + 2 * D) + e * D * M + head + again


def input_bytes(model: ViTConfig, micro_batch: int, precision: Precision) -> int:
    """Bytes of a micro-batch's images: normalised in fp32, and their 16-bit copy that the model reads."""
    height, width = model.image_size
    return micro_batch * 3 * height * width * (4 if precision == "fp32" else 4 + _element(precision))


def checkpoint_bytes(model: ViTConfig, config: RunConfig) -> int:
    """Bytes of one checkpoint on disk, all ranks together: engine files (weights below stage 3, master weights above
    stage 0, moments) and model.pt."""
    stage, e = config.engine.zero_stage, _element(config.engine.precision)
    each = (e if stage < 3 else 0) + (4 if stage > 0 else 0) + _moments_bytes(config.optimizer)
    return num_parameters(model) * (each + 4)


def _block(model: ViTConfig, micro_batch: int, precision: Precision) -> int:
    """What one encoder block keeps: both LayerNorms' inputs and outputs, q, k, v, attention's output (8 D a token), the
    MLP before and after GELU (2 M); fp32 means and deviations, attention's row sums; dropout's masks."""
    T = micro_batch * model.num_tokens
    D, M = model.width, model.mlp_width
    numbers = _element(precision) * T * (8 * D + 2 * M)
    masks = T * (2 * D + M) if model.dropout else 0
    return numbers + 4 * T * (4 + model.num_heads) + masks


def _element(precision: Precision) -> int:
    return 4 if precision == "fp32" else 2


def _moments_bytes(optimizer: OptimizerConfig) -> int:
    """Of the optimizer's fp32 state for each parameter."""
    return 8 if optimizer.name == "adam" else 4 * bool(optimizer.momentum)


def _optimizer_work(optimizer: OptimizerConfig) -> int:
    """Bytes for each parameter that torch's foreach optimizers take in a step: Adam the root of the second moment, SGD
    the gradient with its decay."""
    return 4 if optimizer.name == "adam" or optimizer.weight_decay else 0


def _undecayed(model: ViTConfig) -> int:
    """Parameters in the group without weight decay: biases, LayerNorms, class token, positions."""
    D, M, K = model.width, model.mlp_width, model.num_classes
    block = 4 * D + M + D + 4 * D
    return D + D + model.num_tokens * D + model.depth * block + 2 * D + D * bool(model.representation) + K


def _largest_parameter(model: ViTConfig) -> int:
    D = model.width
    return max(3 * D * D, D * model.mlp_width, D * model.num_classes)


def _persistent(model: ViTConfig) -> int:
    """Parameters in tensors below stage 3's threshold."""
    D, M, K, P = model.width, model.mlp_width, model.num_classes, model.patch_size
    block = [3 * D * D, 3 * D, D * D, D, D * M, M, M * D, D, D, D, D, D]
    rest = [3 * P * P * D, D, D, model.num_tokens * D, D, D, D * K, K]
    if model.representation:
        rest += [D * D, D]
    return sum(n for n in model.depth * block + rest if n < PERSISTENCE_THRESHOLD)
