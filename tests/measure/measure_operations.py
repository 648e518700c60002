"""Time of a training step from first principles, beside what is measured: arithmetic and memory traffic of each operation, and a GPU's data sheet.

    python tests/measure/measure_operations.py ViT-L/16 --pixels 224 --batch 128 --tflops 700     # reached by a plain product here

Letters as in `pipeline/model/vit.py`: B images, N tokens, D width, H heads, M MLP width; T = B x N tokens of a micro-batch.
An operation takes the longer of its arithmetic and its traffic between memory and the chip. These are lower bounds: no kernel
reaches the data sheet's figures, and a plain product of large bf16 matrices reaches about 80 % on an H100.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from data_tools.bench.gpu.gpu_step import Case, _plain_step, _synchronize
from data_tools.bench.record import markdown
from pipeline.model import ViTConfig, num_parameters
from pipeline.monitor.gpus import Gpu, find_gpu
from pipeline.process.distributed import use_exact_arithmetic

_BF16 = 2  # bytes
_STEPS = 3  # Before the profile, and in it.


# Exponentials of the special function units in T/s: 16 per clock of each multiprocessor (CUDA programming guide, table of arithmetic throughput) x
# multiprocessors x boost clock: 132 x 1.83 GHz (the 3.9 T/s of the FlashAttention-3 paper), 114 x 1.755, 108 x 1.41.
_EXPONENTIALS = {"H200": 3.87, "H100 PCIe": 3.2, "H100": 3.87, "A100": 2.44, "A100 PCIe": 2.44}


@dataclass(frozen=True)
class Operation:
    """One row of the table, forward and backward pass, of one block (in_block) or of the whole step.

    model_flops: as MFU counts them. flops: as executed on tensor cores. exponentials: as executed. bytes, fused_bytes: traffic
    as separate operations, and with neighbouring operations fused by a compiler or a fused optimizer.
    """

    name: str
    in_block: bool
    model_flops: float = 0.0
    flops: float = 0.0
    exponentials: float = 0.0
    bytes: float = 0.0
    fused_bytes: float = 0.0

    def seconds(self, gpu: Gpu, is_fused: bool = True) -> float:
        traffic = self.fused_bytes if is_fused else self.bytes
        return max(
            self.flops / (gpu.tflops * 1e12),
            self.exponentials / (_EXPONENTIALS[gpu.kind] * 1e12),
            traffic / gpu.bandwidth,
        )


@dataclass(frozen=True)
class Bound:
    """Lower bound of a step, in seconds on the GPU; mfu: against the data sheet's peak."""

    seconds: float
    mfu: float


def find_sheet(name: str) -> Gpu | None:
    """The data sheet of a GPU by CUDA's name; None if its exponentials are not in the table."""
    gpu = find_gpu(name)
    return gpu if gpu and gpu.kind in _EXPONENTIALS else None


def operations(config: ViTConfig, batch: int) -> list[Operation]:
    """The operations of one bf16 training step on `batch` images, with fp32 master weights and AdamW."""
    B, N, D, H, M = batch, config.num_tokens, config.width, config.num_heads, config.mlp_width
    T, P = B * N, num_parameters(config)
    rows, columns = config.grid
    patches, pixels = B * rows * columns, 3 * config.patch_size**2

    def product(name: str, inputs: int, outputs: int, count: int = 1) -> Operation:
        flops = 3 * 2.0 * T * inputs * outputs * count  # output, gradient of the input, gradient of the weights
        traffic = 3.0 * _BF16 * (T * inputs + T * outputs + inputs * outputs) * count
        return Operation(name, True, flops, flops, 0.0, traffic, traffic)

    def elementwise(name: str, passes: float, fused: float, of_width: int = D) -> Operation:
        """passes: how many times a tensor of (T, of_width) is read or written."""
        return Operation(name, True, bytes=_BF16 * T * of_width * passes, fused_bytes=_BF16 * T * of_width * fused)

    embedding = 2.0 * patches * pixels * D
    scores = 2.0 * B * N * N * D  # one of the products of attention
    attention_traffic = _BF16 * T * D * (4 + 8.0)  # q, k, v, out; backward also their gradients and out's
    return [
        product("qkv products", D, 3 * D),
        # Forward 2 products; backward 4, and the scores once more, which were not kept.
        Operation("attention products", True, 6 * scores, 7 * scores, 0.0, attention_traffic, attention_traffic),
        Operation("attention softmax", True, exponentials=2.0 * B * H * N * N),  # again in the backward pass
        product("output product", D, D),
        product("MLP products", D, M, count=2),
        # Each of two: forward reads 1, writes 1; backward reads 2, writes 1. Fused, the residual's sum is read at no cost.
        elementwise("layer norms", 2 * 5, 2 * 3),
        elementwise("GELU", 5, 5, M),
        elementwise("residuals", 2 * 6, 2 * 5),
        # Sums of the gradients of four outputs, 3D, D, M and D wide.
        elementwise("bias gradients", 1, 0, 5 * D + M),
        elementwise("q, k, v gradients into one", 6, 6),
        # Without a gradient for the images. MFU counts three products, as usual.
        Operation("patch embedding", False, 3 * embedding, 2 * embedding, 0.0, *[2.0 * _BF16 * (patches * (pixels + D))] * 2),
        # fp32 gradient from bf16 (6 bytes), its norm (4), clipping (8), AdamW (reads 16, writes 12), bf16 copy (6). AdamW
        # of separate tensor operations: decay 8, moments 12 + 8 + 12, root, quotient and epsilon 24, update 16.
        Operation("optimizer", False, bytes=(24.0 + 80) * P, fused_bytes=(24.0 + 28) * P),
    ]  # fmt: skip


def bound(config: ViTConfig, batch: int, gpu: Gpu, tflops: float = 0.0) -> Bound:
    """Lower bound of the step. tflops: of matrix products, where less than the peak is known to be reached; 0 is the peak."""
    reached = replace(gpu, tflops=tflops or gpu.tflops)
    found = operations(config, batch)
    seconds = sum(o.seconds(reached) * (config.depth if o.in_block else 1) for o in found)
    flops = sum(o.model_flops * (config.depth if o.in_block else 1) for o in found)
    return Bound(seconds, flops / seconds / (gpu.tflops * 1e12))


def measured_rows(events: Iterable[Any], config: ViTConfig, batch: int, steps: int) -> dict[str, float]:
    """Seconds a step of each operation from a torch.profiler profile of `steps` steps, and of others by name ("other: aten::copy_").

    events: of `key_averages(group_by_input_shape=True)`. Those without time on a GPU count with their time on the CPU if none
    has any. Products are recognised by their shapes; softmax is contained in the attention products.
    """
    # Kernels are listed a second time, as events of the GPU; an optimizer's step, which is annotated, contains kernels.
    listed = [
        event for event in events if event.device_type == torch.autograd.DeviceType.CPU and not event.is_user_annotation
    ]
    on_gpu = any(event.self_device_time_total for event in listed)
    found: dict[str, float] = {}
    for event in listed:
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if not microseconds:
            continue
        name = _row_of(event.key, event.input_shapes, config, batch)
        found[name] = found.get(name, 0.0) + microseconds * 1e-6 / steps
    return found


# Names of operators, without "aten::". The first match counts.
_NAMES = {
    "attention products": r"_?(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)",
    "layer norms": r"native_layer_norm",
    "GELU": r"gelu",
    "patch embedding": r"(cudnn_|mkldnn_|slow_)?conv|_convolution|thnn_conv",
    "optimizer": r"_foreach|_fused|linalg_vector_norm",
    "bias gradients": r"sum$",
}


def _row_of(key: str, shapes: Iterable[Any], config: ViTConfig, batch: int) -> str:
    T, D, M = batch * config.num_tokens, config.width, config.mlp_width
    name = key.removeprefix("aten::")
    dimensions = {size for shape in shapes for size in shape if isinstance(size, int)}
    if re.match(r"(addmm|mm|bmm|baddbmm|mkldnn_linear|linear)", name):
        if re.match(r"b", name):
            return "attention products"  # The unfused backend.
        kinds = {"qkv products": {T, D, 3 * D}, "output product": {T, D}, "MLP products": {T, D, M}}
        return next((row for row, sizes in kinds.items() if dimensions == sizes), f"other: {key}")
    for row, pattern in _NAMES.items():
        if re.match(pattern, name):
            return row
    if re.match(r"add_?$", name) and [batch, config.num_tokens, D] in [list(cast(Any, shape)) for shape in shapes]:
        return "residuals"
    if re.match(r"(copy_|stack|cat)$", name) and {config.num_heads, D // config.num_heads} <= dimensions:
        return "q, k, v gradients into one"
    return f"other: {key}"


def profile(case: Case) -> dict[str, float]:
    """Seconds of each operation (`measured_rows`) of the plain step with deterministic kernels, from torch.profiler."""
    use_exact_arithmetic(torch.device(case.device))
    step = _plain_step(case)
    for _ in range(_STEPS):
        step()
    _synchronize(case)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if case.device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
        for _ in range(_STEPS):
            step()
        _synchronize(case)
    return measured_rows(profiler.key_averages(group_by_input_shape=True), case.config, case.batch, _STEPS)


def predictions(case: Case, gpu: Gpu | None, measured: Mapping[str, float]) -> str:
    """Markdown of the operations of one block, and of the last two, of the whole step. gpu: None predicts nothing.

    measured: seconds of a step, as `measured_rows` returns.
    """
    lines = []
    for o in operations(case.config, case.batch):
        predicted = [None if gpu is None else o.seconds(gpu, is_fused) for is_fused in (False, True)]
        # The softmax is in the same kernel as the products.
        seconds = None if o.name == "attention softmax" else measured.get(o.name)
        lines.append(
            [
                o.name + ("" if o.in_block else " (whole step)"), f"{o.flops / 1e9:,.1f}", f"{o.bytes / 1e6:,.0f}",
                *(_us(seconds_of, "") for seconds_of in predicted),
                _us(seconds and seconds / (case.config.depth if o.in_block else 1), "not measured"),
            ]
        )  # fmt: skip
    heads = ["operation, forward + backward", "GFLOP", "MB", "predicted us", "fused us", "measured us"]
    return markdown(heads, lines)


def _us(seconds: float | None, missing: str) -> str:
    return missing if seconds is None else f"{1e6 * seconds:,.0f}"


def main() -> None:
    """Print the table of one block's operations in microseconds and, on a GPU of the table, the least time of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tflops", type=float, default=0.0, help="of matrix products; 0 is the data sheet's peak")
    given = parser.parse_args()
    case = Case(given.model, given.pixels, given.batch, 0.0, given.device)
    gpu = find_sheet(torch.cuda.get_device_name()) if given.device == "cuda" else None
    print(predictions(case, gpu, profile(case)))
    if gpu:
        least = bound(case.config, case.batch, gpu, given.tflops)
        print(f"\nleast time of a step: {1e3 * least.seconds:,.1f} ms, MFU {least.mfu:.1%}")


if __name__ == "__main__":
    main()
