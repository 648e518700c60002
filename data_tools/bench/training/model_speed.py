"""Speed of the ViT on a CPU, beside a minimal ViT and that of `transformers`, with the machine's matrix product as the limit.

Contestants take turns, each in a process of its own, so that they share neither memory nor threads. Shape letters as in
`pipeline/model/vit.py`.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_tools.bench.corpus import NUM_CLASSES, noise_batch
from data_tools.bench.measure import Contestant, Timing, race, stepping
from data_tools.bench.record import BenchRecord, markdown
from data_tools.bench.training import objective_speed
from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.loading.loader import Batch, normalise
from pipeline.process.start import keep_freed_memory
from pipeline.settings.commands.bench import ModelBenchConfig

_OURS, _PRODUCT = "ours", "product"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HEADS = ("", "GELU", "CPU ms per image", "of the product", "ours (tanh) is faster", "ours with the same GELU")


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


def run(config: ModelBenchConfig, record: BenchRecord) -> None:
    """Measure, and print a table for each model and precision. Raises UserError for a model that is no plain ViT."""
    cases = {name: models.configure(name, config.image_size, NUM_CLASSES) for name in config.models}
    for name, case in cases.items():
        # The others are written for exactly this architecture.
        if not isinstance(case, models.ViTConfig) or case.has_stem or case.axial:
            raise UserError(f"models: {name} is not a plain Vision Transformer.")
    # Here once, not in each process, and its ViT, which it imports at first use; without it, they say that it is not installed.
    with contextlib.suppress(ImportError):
        from transformers import ViTForImageClassification  # noqa: F401
    for name, case in cases.items():
        assert isinstance(case, models.ViTConfig)
        for precision in config.precisions:
            for work in config.work:
                if work == "objectives":
                    objective_speed.measure(config, name, precision, _DTYPES[precision], record)
                    continue
                _measure(config, f"{name} {precision} {work}", case, _DTYPES[precision], work, record)


def minimal_vit(config: models.ViTConfig) -> nn.Module:
    """The minimal model with the weights of ours."""
    copy_parameters(models.build(config), minimal := MinimalViT(config))
    return minimal


@torch.no_grad()
def copy_parameters(model: nn.Module, minimal: nn.Module) -> None:
    for mine, its in zip(model.parameters(), minimal.parameters(), strict=True):
        its.copy_(mine)


def transformers_vit(config: models.ViTConfig) -> nn.Module:
    """The same architecture in `transformers`. Raises ImportError if that is not installed."""
    import transformers

    settings = transformers.ViTConfig(
        hidden_size=config.width, num_hidden_layers=config.depth, num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_width, image_size=config.image_size, patch_size=config.patch_size, num_labels=config.num_classes,
        hidden_act="gelu_pytorch_tanh" if config.gelu == "tanh" else "gelu", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.ViTForImageClassification(settings)


_MAKERS: dict[str, Callable[[models.ViTConfig], nn.Module]] = {
    _OURS: models.build, "minimal": minimal_vit, "transformers": transformers_vit,
}  # fmt: skip


def _measure(
    config: ModelBenchConfig, title: str, model: models.ViTConfig, dtype: torch.dtype, work: str, record: BenchRecord
) -> None:
    contestants = [_product(config, model, dtype, work)]
    for gelu in ("tanh", "erf"):
        for name in _MAKERS:
            contestants.append(_contestant(config, name, replace(model, gelu=gelu), dtype, work))
    results = race(contestants, config.rounds)
    speeds = {name: found.per_cpu for name, found in results.items() if isinstance(found, Timing)}
    lines = []
    for contestant in contestants:
        name, gelu = contestant.name, contestant.about[0]
        if name not in speeds:
            record.add(f"{title}, {name}", failed=str(results[name]))
            lines.append([name, gelu, f"not measured: {results[name]}", "", "", ""])
            continue
        same = speeds[_named(_OURS, gelu or "tanh")] / speeds[name]
        ours, share = speeds[_named(_OURS, "tanh")] / speeds[name], speeds[name] / speeds[_PRODUCT]
        record.add(
            f"{title}, {name}", cpu_seconds_per_image=1 / speeds[name], share_of_product=share, ours_is_faster=ours,
            ours_with_same_gelu_is_faster=same,
        )  # fmt: skip
        lines.append([name, gelu, f"{1e3 / speeds[name]:.1f}", f"{share:.0%}", f"{ours:.2f}", f"{same:.2f}"])
    flops = _flops(model, work)
    print(f"\n{title}, batch {config.batch}, {counted(config.threads, 'thread')}; the product does "
          f"{flops * speeds[_PRODUCT] / 1e9:,.0f} GFLOP per CPU second\n")  # fmt: skip
    print(markdown(_HEADS, lines), flush=True)


def _contestant(
    config: ModelBenchConfig, name: str, model_config: models.ViTConfig, dtype: torch.dtype, work: str
) -> Contestant:
    step = _train if work == "training" else _infer
    batch = noise_batch(config.batch, config.image_size)

    def make() -> Callable[[], object]:
        torch.set_num_threads(config.threads)
        if name == _OURS and work == "inference":
            keep_freed_memory()  # As `loaded_model.load_model` does.
        return partial(step, _MAKERS[name](model_config).to(dtype), batch)

    counts = [config.batch] * config.steps
    return stepping(_named(name, model_config.gelu), [model_config.gelu], config.threads, counts, make)


def _product(config: ModelBenchConfig, model: models.ViTConfig, dtype: torch.dtype, work: str) -> Contestant:
    """The product of the MLP's first layer, again and again, until it has done as much arithmetic as the model."""
    N, D, M = config.batch * model.num_tokens, model.width, model.mlp_width
    count = max(1, round(_flops(model, work) * config.batch / (2 * N * D * M)))

    def steps() -> Iterator[int]:
        torch.set_num_threads(config.threads)
        a, b, out = torch.randn(N, D).to(dtype), torch.randn(D, M).to(dtype), torch.empty(N, M, dtype=dtype)
        for _ in range(config.steps):
            for _ in range(count):
                torch.mm(a, b, out=out)
            yield config.batch

    return Contestant(_PRODUCT, [""], config.threads, steps)


def _named(name: str, gelu: str) -> str:
    return f"{name}, {gelu}"


def _flops(model: models.ViTConfig, work: str) -> float:
    """FLOPs of one image."""
    return models.training_flops_per_image(model) / (1 if work == "training" else 3)


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
