"""Speed of the ViT on this CPU, in CPU seconds, beside a minimal ViT in plain PyTorch and that of `transformers`, if installed.

    python tests/measure/measure_model_speed.py training ViT-S/16 --batch 8      # forward and backward pass
    python tests/measure/measure_model_speed.py inference ViT-B/16 --batch 8 --rounds 3
    python tests/measure/measure_model_speed.py objectives ViT-S/16 --batch 2    # MAE, DINO and LeJEPA beside classification, ours alone

Contestants take turns, each in a process of its own, so that they share neither memory nor threads; with each form of GELU, and with the
machine's matrix product as the limit. Shape letters as in `pipeline/model/vit.py`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from contestants import Contestant, Timing, race
from torch import Tensor, nn

from data_tools.bench.corpus import NUM_CLASSES, noise_batch, noise_of, objective_run
from data_tools.bench.record import markdown
from pipeline import model as models
from pipeline import objectives
from pipeline.architecture.pixels import RGB8
from pipeline.data.loading.loader import Batch, normalise
from pipeline.objectives import on_meta
from pipeline.objectives.mae import Mae
from pipeline.process.start import keep_freed_memory
from pipeline.settings.run import RunConfig

OURS, PRODUCT = "ours", "product"
PLAIN, ENCODER = "softmax", "mae, encoder alone"
# By name, the value of train.loss.
STEPS = {PLAIN: "softmax", ENCODER: "mae", "mae": "mae", "dino": "dino", "lejepa": "lejepa"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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


@torch.no_grad()
def check_minimal() -> None:
    """The minimal model computes what ours does."""
    for gelu in ("tanh", "erf"):
        config = replace(cast(models.ViTConfig, models.configure("ViT-mu/16", 32, 10)), gelu=gelu)
        ours, minimal = models.build(config), MinimalViT(config)
        for mine, its in zip(ours.parameters(), minimal.parameters(), strict=True):
            its.copy_(mine.normal_(0, 0.3))  # Also the head, which is initialised to zero.
        images = torch.rand(2, 3, 32, 32)
        torch.testing.assert_close(ours.eval()(images), minimal.eval()(images), rtol=0, atol=1e-4)


def transformers_vit(config: models.ViTConfig) -> nn.Module:
    """The same architecture in `transformers`. Raises ImportError if that is not installed."""
    import transformers

    settings = transformers.ViTConfig(
        hidden_size=config.width, num_hidden_layers=config.depth, num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_width, image_size=config.image_size, patch_size=config.patch_size, num_labels=config.num_classes,
        hidden_act="gelu_pytorch_tanh" if config.gelu == "tanh" else "gelu", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.ViTForImageClassification(settings)


MAKERS: dict[str, Callable[[models.ViTConfig], nn.Module]] = {
    OURS: models.build, "minimal": MinimalViT, "transformers": transformers_vit,
}  # fmt: skip


def stepping(name: str, given: argparse.Namespace, make: Callable[[], Callable[[], object]]) -> Contestant:
    """A contestant that calls what `make` returns. It is made, and called once, in the process in which it is timed, before timing starts."""
    made: list[Callable[[], object]] = []

    def prepare() -> None:
        torch.set_num_threads(given.threads)
        made.append(make())
        made[0]()

    def step() -> Iterator[int]:
        made[0]()
        yield given.batch

    return Contestant(name, [], given.threads, step, prepare=prepare)


def measure_model(given: argparse.Namespace, model: models.ViTConfig, dtype: torch.dtype) -> None:
    """Print a table of the contestants."""
    flops = models.training_flops_per_image(model) / (1 if given.work == "training" else 3)
    batch = noise_batch(given.batch, given.pixels)

    def make(name: str, config: models.ViTConfig) -> Callable[[], object]:
        if name == OURS and given.work == "inference":
            keep_freed_memory()  # As `loaded_model.load_model` does.
        return partial(train if given.work == "training" else infer, MAKERS[name](config).to(dtype), batch)

    def product() -> Callable[[], object]:
        """The product of the MLP's first layer, again and again, until it has done as much arithmetic as the model."""
        N, D, M = given.batch * model.num_tokens, model.width, model.mlp_width
        a, b, out = torch.randn(N, D).to(dtype), torch.randn(D, M).to(dtype), torch.empty(N, M, dtype=dtype)
        count = max(1, round(flops * given.batch / (2 * N * D * M)))
        return lambda: [torch.mm(a, b, out=out) for _ in range(count)]

    contestants = [stepping(PRODUCT, given, product)]
    for gelu in ("tanh", "erf"):
        for name in MAKERS:
            contestants.append(stepping(f"{name}, {gelu}", given, partial(make, name, replace(model, gelu=gelu))))
    results = race(contestants, given.rounds)
    speeds = {name: found.per_cpu for name, found in results.items() if isinstance(found, Timing)}
    lines = []
    for name, found in results.items():
        if name not in speeds:
            lines.append([name, f"not measured: {found}", "", ""])
            continue
        same = speeds.get(f"{OURS}, {name.rpartition(' ')[2]}", speeds[f"{OURS}, tanh"]) / speeds[name]
        lines.append([name, f"{1e3 / speeds[name]:.1f}", f"{speeds[name] / speeds[PRODUCT]:.0%}", f"{same:.2f}"])
    print(f"\nthe product does {flops * speeds[PRODUCT] / 1e9:,.0f} GFLOP per CPU second\n")
    print(markdown(["", "CPU ms per image", "of the product", "ours with the same GELU is faster"], lines), flush=True)


def train(model: nn.Module, batch: Batch) -> None:
    """Forward, loss and backward."""
    model.train()
    F.cross_entropy(logits(model, batch), batch.labels[:, 0]).backward()
    forget_gradients(model)


@torch.no_grad()
def infer(model: nn.Module, batch: Batch) -> Tensor:
    """Logits from uint8 pixels, as `LoadedModel.logits` computes them for predict.py; features lack only the head's product."""
    return logits(model.eval(), batch)


def logits(model: nn.Module, batch: Batch) -> Tensor:
    """float32 (B, K)"""
    found = model(normalise(batch.images, torch.device("cpu"), next(model.parameters()).dtype, RGB8))
    return (found if isinstance(found, Tensor) else found.logits).float()


def forget_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def measure_objectives(given: argparse.Namespace, dtype: torch.dtype) -> None:
    """Print a table of the objectives' steps: forward pass, loss and backward pass."""
    runs = {step: objective_run(loss, given.model, given.pixels, given.batch) for step, loss in STEPS.items()}
    results = race(
        [stepping(step, given, partial(make_objective, step, run, given.batch, dtype)) for step, run in runs.items()],
        given.rounds,
    )
    flops = {
        step: on_meta.training_flops(objectives.kind(run.train.loss), run, objectives.new_backbone(run, NUM_CLASSES))
        for step, run in runs.items()
    }
    plain, lines = results[PLAIN], []
    for step, found in results.items():
        if not (isinstance(found, Timing) and isinstance(plain, Timing)):
            lines.append([step, f"not measured: {found}", "", ""])
            continue
        arithmetic = "" if step == ENCODER else f"{flops[step] / flops[PLAIN]:.0%}"
        share = plain.per_cpu / found.per_cpu
        lines.append([step, f"{1e3 / found.per_cpu:,.1f}", f"{share:.0%}", arithmetic])
    print(markdown(("", "CPU ms per image", "of the ViT's step", "of its arithmetic"), lines), flush=True)


def make_objective(name: str, run: RunConfig, batch: int, dtype: torch.dtype) -> Callable[[], None]:
    model = models.build(objectives.new_backbone(run, NUM_CLASSES))
    objective = on_meta.cast(objectives.create(run, model), dtype)
    read = objective.inputs(noise_of(run, batch), torch.device("cpu"), None)
    read = read._replace(views=tuple(view.to(dtype) for view in read.views))
    objective.num_steps = 100
    objective.before_step(0)

    def step() -> None:
        if name == ENCODER:
            loss = cast(Mae, objective).encode(read.views[0], read.facts["kept"]).float().mean()
        else:
            loss = objective(*read)[0]
        loss.backward()
        forget_gradients(objective)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("training", "inference", "objectives"))
    parser.add_argument("model")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    # CPU seconds are reliable beside other load only with one.
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    check_minimal()
    if given.work == "objectives":
        measure_objectives(given, DTYPES[given.precision])
    else:
        model = cast(models.ViTConfig, models.configure(given.model, given.pixels, NUM_CLASSES))
        measure_model(given, model, DTYPES[given.precision])


if __name__ == "__main__":
    main()
