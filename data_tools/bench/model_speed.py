"""Speed of the ViT on a CPU, beside a minimal ViT and that of `transformers`, with the machine's matrix product as the limit.

All contestants take turns in one process, so that other load on the machine affects all of them. Shape letters as in
`pipeline/model/vit.py`.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_tools.bench.corpus import noise_batch
from data_tools.bench.gpu_step import NUM_CLASSES, transformers_vit
from data_tools.bench.record import Record, markdown
from pipeline import model as models
from pipeline.data.loading.loader import Batch, normalise
from pipeline.errors import UserError
from pipeline.settings.bench import ModelBenchConfig

_OURS = "ours"
_PRODUCT = "product"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WORK = ("training", "inference")
_HEADS = ("model", "precision", "work", "contestant", "GELU", "CPU s", "of the product", "ours is faster", "same GELU")


class MinimalBlock(nn.Module):
    """A pre-norm encoder block in plain modules. (B, N, D) -> same."""

    def __init__(self, config: models.ViTConfig) -> None:
        super().__init__()
        D, M = config.width, config.mlp_width
        self.num_heads, self.gelu = config.num_heads, "tanh" if config.gelu == "tanh" else "none"
        self.norm1 = nn.LayerNorm(D, eps=config.layer_norm_eps)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm2 = nn.LayerNorm(D, eps=config.layer_norm_eps)
        self.up, self.down = nn.Linear(D, M), nn.Linear(M, D)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(B, N, self.num_heads, -1).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.gelu))


class MinimalViT(nn.Module):
    """The ViT as one would write it down; its parameters are in the order of ours. (B, 3, height, width) -> (B, K)."""

    def __init__(self, config: models.ViTConfig) -> None:
        super().__init__()
        D, P = config.width, config.patch_size
        self.class_token = nn.Parameter(torch.zeros(1, 1, D))
        self.positions = nn.Parameter(torch.zeros(1, config.num_tokens, D))
        self.patches = nn.Conv2d(3, D, kernel_size=P, stride=P)
        self.blocks = nn.Sequential(*(MinimalBlock(config) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(D, eps=config.layer_norm_eps)
        self.head = nn.Linear(D, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def run(config: ModelBenchConfig, record: Record) -> None:
    """Measure, and print a table. Raises UserError for a model that is no ViT of the paper."""
    torch.set_num_threads(config.threads)
    configs = {name: models.configure(name, config.image_size, NUM_CLASSES) for name in config.models}
    for name, model_config in configs.items():
        # The others are written for exactly this architecture.
        if not isinstance(model_config, models.ViTConfig) or model_config.stem is not None or model_config.axial:
            raise UserError(f"models: {name} is not a plain Vision Transformer.")
    lines = []
    for name, model_config in configs.items():
        assert isinstance(model_config, models.ViTConfig)
        for precision in config.precisions:
            contestants = make_contestants(model_config, record)
            for work in _WORK:
                lines += _measure(config, name, model_config, precision, work, contestants, record)
    print("\n" + markdown(_HEADS, lines))


def make_contestants(config: models.ViTConfig, record: Record) -> dict[tuple[str, str], nn.Module]:
    """(contestant, GELU) -> model on the CPU, in fp32. Those that are not installed are printed and recorded as failed."""
    found: dict[tuple[str, str], nn.Module] = {}
    for gelu in ("tanh", "erf"):
        ours = models.build(replace(config, gelu=gelu))
        minimal = MinimalViT(replace(config, gelu=gelu))
        with torch.no_grad():
            for mine, its in zip(ours.parameters(), minimal.parameters(), strict=True):
                its.copy_(mine)
        found[_OURS, gelu], found["minimal", gelu] = ours, minimal
        try:
            found["transformers", gelu] = transformers_vit(replace(config, gelu=gelu))
        except ImportError as error:
            if not any(row["name"] == "transformers" for row in record.rows):
                print(f"transformers: not measured, {error}", flush=True)
                record.add("transformers", failed=str(error))
    return found


def _measure(
    config: ModelBenchConfig, name: str, model: models.ViTConfig, precision: str, work: str,
    contestants: dict[tuple[str, str], nn.Module], record: Record,
) -> list[list[str]]:  # fmt: skip
    """Time all contestants in turn; returns lines of the table."""
    dtype, batch = _DTYPES[precision], noise_batch(config.batch, config.image_size)
    step = _train if work == "training" else _infer
    steps: dict[tuple[str, str], Callable[[], object]] = {
        _key: _bound(step, m.to(dtype), batch) for _key, m in contestants.items()
    }
    shape = config.batch * model.num_tokens, model.width, model.mlp_width
    a, b = torch.randn(shape[0], shape[1]).to(dtype), torch.randn(shape[1], shape[2]).to(dtype)
    steps[_PRODUCT, ""] = lambda: a @ b
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for round_number in range(-1, config.rounds):  # The first is a warm-up.
        for key, run_step in steps.items():
            begin = time.process_time()
            run_step()
            if round_number >= 0:
                seconds[key].append(time.process_time() - begin)
    medians = {key: statistics.median(taken) for key, taken in seconds.items()}
    product = 2 * shape[0] * shape[1] * shape[2] / medians.pop((_PRODUCT, ""))
    flops = models.training_flops_per_image(model) * config.batch / (1 if work == "training" else 3)
    print(
        f"{name}, {precision}, {work}: a plain product of {shape[0]} x {shape[1]} x {shape[2]} does {product / 1e9:,.0f} GFLOP/s",
        flush=True,
    )
    lines = []
    for (contestant, gelu), taken in medians.items():
        # Medians of ratios of the same round, in which both had the same load beside them.
        ours, same = (
            statistics.median(x / y for x, y in zip(seconds[contestant, gelu], seconds[_OURS, which], strict=True))
            for which in ("tanh", gelu)
        )
        share = flops / taken / product
        record.add(
            f"{name} {precision} {work}, {contestant} {gelu}", cpu_seconds=taken, share_of_product=share,
            relative_to_ours=ours, relative_to_ours_same_gelu=same, product_gflops=product / 1e9,
        )  # fmt: skip
        ratios = ["", ""] if contestant == _OURS and gelu == "tanh" else [f"{ours:.2f}", f"{same:.2f}"]
        lines.append([name, precision, work, contestant, gelu, f"{taken:.3f}", f"{share:.0%}", *ratios])
    return lines


def _bound(step: Callable[[nn.Module, Batch], object], model: nn.Module, batch: Batch) -> Callable[[], object]:
    return lambda: step(model, batch)


def _train(model: nn.Module, batch: Batch) -> None:
    """Forward, loss and backward."""
    model.train()
    F.cross_entropy(_logits(model, batch), batch.labels[:, 0]).backward()
    for parameter in model.parameters():
        parameter.grad = None


@torch.no_grad()
def _infer(model: nn.Module, batch: Batch) -> Tensor:
    """Logits from uint8 pixels, as `LoadedModel.logits` computes them for predict.py; features lack only the head's product."""
    return _logits(model.eval(), batch)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """float32 (B, K)"""
    found = model(normalise(batch.images, torch.device("cpu"), next(model.parameters()).dtype))
    return (found if isinstance(found, Tensor) else found.logits).float()
