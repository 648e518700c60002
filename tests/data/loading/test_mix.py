"""Mixup and CutMix: weights are from Beta, pairs are mixed by the formula, and nothing depends on ranks or
micro-batches.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tiny import train_view

from pipeline.architecture.pixels import RGB8
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.loader import Loader, normalise, train_requests
from pipeline.data.loading.mix import Mixing, draw_mixing, mix_images, mix_pairs
from pipeline.data.loading.order import SampleOrder
from pipeline.objectives.classification import losses
from pipeline.objectives.objective import mean_of_valid
from pipeline.settings.run import AugmentConfig

CPU = torch.device("cpu")
SIZE = 16
BOTH = AugmentConfig(mixup=0.5, cutmix=1.0, randaugment_layers=2, color_jitter=0.4, erase=0.5)


def draws(count: int = 3000, **config: float) -> list[Mixing]:
    found = [draw_mixing(AugmentConfig(**config), 224, 0, step) for step in range(count)]
    return [mixing for mixing in found if mixing is not None]


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 1.0])
def test_mixups_share_is_the_larger_of_a_beta(alpha: float) -> None:
    shares = [mixing.own for mixing in draws(mixup=alpha)]
    assert min(shares) >= 0.5
    assert stats.kstest(shares, lambda x: 2 * stats.beta.cdf(x, alpha, alpha) - 1).pvalue > 0.001


def test_cutmixs_box_has_the_share_that_it_says() -> None:
    found = draws(cutmix=1.0)
    uncut, edges = [], np.zeros(4, int)
    for mixing in found:
        top, left, bottom, right = mixing.box
        assert 0 <= top <= bottom <= 224
        assert 0 <= left <= right <= 224
        assert mixing.own == pytest.approx(1 - (bottom - top) * (right - left) / 224**2)
        edges += np.array([top == 0, left == 0, bottom == 224, right == 224])
        if top > 0 and left > 0 and bottom < 224 and right < 224:
            uncut.append(((bottom - top) * (right - left), (bottom - top) - (right - left)))
    assert (edges > 100).all()
    assert {shape for _, shape in uncut} == {0}  # A square, unless the image border clips it.
    # Beta(1, 1) is uniform: for an area share a, (1 - sqrt(a))^2 of the positions do not clip the box; 1/6 on average.
    assert abs(len(uncut) / len(found) - 1 / 6) < 0.03


def test_the_box_of_images_that_are_not_square_has_their_shape() -> None:
    for step in range(200):
        mixing = draw_mixing(AugmentConfig(cutmix=1.0), (100, 300), 0, step)
        top, left, bottom, right = mixing.box
        assert 0 <= top <= bottom <= 100
        assert 0 <= left <= right <= 300
        assert mixing.own == pytest.approx(1 - (bottom - top) * (right - left) / 30_000)
        if top > 0 and left > 0 and bottom < 100 and right < 300:
            assert (right - left) / 300 == pytest.approx((bottom - top) / 100, abs=0.03)


def test_both_take_turns_and_neither_mixes_nothing() -> None:
    kinds = [mixing.box is None for mixing in draws(1000, mixup=0.8, cutmix=1.0)]
    assert 437 < sum(kinds) < 563  # 4 standard deviations
    assert draw_mixing(AugmentConfig(), 224, 0, 0) is None
    # The choice between the two is independent of the weight.
    shares = [mixing.own for mixing in draws(2000, mixup=1.0, cutmix=1.0) if mixing.box is None]
    assert stats.kstest(shares, stats.uniform(0.5, 0.5).cdf).pvalue > 0.001


def test_a_step_draws_the_same_again_and_another_something_else() -> None:
    config = AugmentConfig(mixup=0.8, cutmix=1.0)
    assert draw_mixing(config, 224, 3, 7) == draw_mixing(config, 224, 3, 7)
    assert draw_mixing(config, 224, 3, 7) != draw_mixing(config, 224, 3, 8)
    assert draw_mixing(config, 224, 3, 7) != draw_mixing(config, 224, 4, 7)


def test_mixup_by_hand() -> None:
    x = images(4)
    mixed, own = mix_images(x, torch.ones(4, dtype=torch.bool), Mixing(0.75, None))
    assert own.tolist() == [0.75] * 4
    torch.testing.assert_close(mixed, 0.75 * x + 0.25 * x[[1, 0, 3, 2]])


def test_cutmix_by_hand() -> None:
    x = images(4)
    mixed, own = mix_images(x, torch.ones(4, dtype=torch.bool), Mixing(1 - 6 * 4 / 256, (2, 3, 8, 7)))
    assert own.tolist() == [1 - 24 / 256] * 4
    expected = x.clone()
    expected[:, :, 2:8, 3:7] = x[[1, 0, 3, 2], :, 2:8, 3:7]
    assert torch.equal(mixed, expected)
    assert (mixed != x).float().mean().item() == pytest.approx(24 / 256)


@pytest.mark.parametrize("box", [None, (2, 3, 8, 7)])
@pytest.mark.parametrize("bad", [2, 3])
def test_an_unreadable_sample_leaves_its_partner_unmixed(bad: int, box: tuple[int, int, int, int] | None) -> None:
    x, valid = images(6), torch.arange(6) != bad
    mixed, own = mix_images(x, valid, Mixing(0.6, box))
    torch.testing.assert_close(own, torch.tensor([0.6, 0.6, 1, 1, 0.6, 0.6]))
    assert torch.equal(mixed[2:4], x[2:4])
    assert not (mixed[[0, 1, 4, 5]] == x[[0, 1, 4, 5]]).all(dim=(1, 2, 3)).any()


@pytest.mark.parametrize(("kind", "smoothing"), [("softmax", 0.0), ("softmax", 0.1), ("sigmoid", 0.0)])
def test_the_loss_of_mixed_targets_is_the_mixed_loss(kind: str, smoothing: float) -> None:
    # Both losses are linear in the target, so mixing targets must be the same as mixing losses.
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    labels = torch.tensor([[0, -1], [3, 1], [2, -1], [4, 0]])
    own, valid = torch.tensor([0.7, 0.7, 1.0, 1.0]), torch.tensor([True, True, True, False])
    first = losses(logits, labels, kind, smoothing)
    second = losses(logits, labels[[1, 0, 3, 2]], kind, smoothing)
    expected = own * first + (1 - own) * second
    torch.testing.assert_close(losses(logits, labels, kind, smoothing, own), expected)
    found = mean_of_valid(losses(logits, labels, kind, smoothing, own), valid)
    torch.testing.assert_close(found, expected[:3].sum() / 4)
    gradient = torch.autograd.grad(found, logits)[0]
    assert (gradient[3] == 0).all()


def mixed_step(dataset: Path, step: int, world_size: int, micro_batch: int, threads: int) -> list[torch.Tensor]:
    """Images, targets and losses of global batch `step`, concatenated from the micro-batches of all ranks."""
    split = open_dataset(dataset).split("train")
    order = SampleOrder(split.shard_sizes, 3, 8, streams=2, window=16)
    mixing = draw_mixing(BOTH, SIZE, 3, step)
    parts = []
    for rank in range(world_size):
        with Loader(split, train_view(BOTH, 3, SIZE), threads, 2, 0.0) as loader:
            for batch in loader.batches(train_requests(order, step, step + 1, micro_batch, rank, world_size)):
                x, own = mix_images(normalise(batch.images, CPU, torch.float32, RGB8), batch.valid, mixing)
                hot = torch.nn.functional.one_hot(batch.labels[:, 0], 4).float()
                logits = torch.arange(len(hot) * 4).reshape(-1, 4).remainder(4).float()
                parts.append((x, mix_pairs(hot, own), losses(logits, batch.labels, "softmax", 0.1, own)))
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def test_any_ranks_micro_batches_and_threads_make_the_same_batch(dataset: Path) -> None:
    steps = (0, 1, 4, 40)
    assert {draw_mixing(BOTH, SIZE, 3, step).box is None for step in steps} == {True, False}
    for step in steps:  # The last is in the third epoch.
        expected = mixed_step(dataset, step, 1, 8, threads=1)
        for world_size, micro_batch, threads in ((1, 4, 4), (2, 4, 3), (2, 2, 2), (4, 2, 4)):
            found = mixed_step(dataset, step, world_size, micro_batch, threads)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), (step, world_size)
