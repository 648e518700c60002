"""The predicted time of a step: NeMo's published scaling, nccl-tests' published bandwidths, formulas with known values."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from pipeline.base.errors import UserError
from pipeline.estimate.cluster import Cluster, lay_out
from pipeline.estimate.network import Network, find_network
from pipeline.estimate.operators import ATTENTION, GELU, MATRICES, NORMS, traffic
from pipeline.estimate.plan import make_plan
from pipeline.estimate.step_time import (
    EFFICIENCY,
    StepTime,
    collectives,
    is_predictable,
    optimizer_bytes,
    passes,
    predicted_speed,
    step_time,
)
from pipeline.model import Config, configure, num_parameters, training_flops_per_image
from pipeline.monitor.gpus import Gpu, find_gpu
from pipeline.settings import schema
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.run import RunConfig

REQUIRED = ["name=x", "data.path=x", "train.length=90 epochs", "model.name=ViT-L/16", "samples=14.2e6", "classes=1000"]


def load(*overrides: str) -> PlanConfig:
    return schema.load(PlanConfig, None, [*REQUIRED, *overrides])


def gpu(name: str) -> Gpu:
    found = find_gpu(name)
    assert found
    return found


H100 = gpu("H100-80GB")


@cache
def vit(name: str = "ViT-L/16") -> Config:
    return configure(name, 224, 1000)


# ---------------------------------------------------------------------- NeMo's published scaling
# docs.nvidia.com/nemo-framework/user-guide/latest/MultimodalModels/VisionLanguageFoundation/Vit/Perf.html: ViT g/14, samples/s on
# 1, 2, 4, 8 and 16 nodes of 8 GPUs. The page does not say whether the batch grew with the nodes.
NEMO = {"A100-80GB": (693, 1347, 2642, 5454, 10644), "H100-80GB": (1428, 2846, 5737, 11222, 21561)}
NODES = (1, 2, 4, 8, 16)


def of_nemo(kind: str, images_per_gpu: int | None, network: str = "") -> list[float]:
    """Predicted images/s on NODES as a share of the published ones. images_per_gpu: None shares 4096 images.

    Of NeMo's figures, only that of one node is used: for the speed of a GPU, not for the network.
    """
    config, fabric, model = load("measured=1"), find_network(network, gpu(kind)), vit("ViT-g/14")

    def time_on(nodes: int, config: PlanConfig) -> tuple[int, StepTime]:
        images = images_per_gpu or 4096 // (8 * nodes)
        micro_batch = min(64, images)  # NeMo's largest for g/14
        return images, step_time(
            config, model, Cluster(nodes, 8, gpu(kind)), fabric, micro_batch, images // micro_batch
        )

    images, time = time_on(1, config)
    config = replace(config, measured=images / (8 * images / NEMO[kind][0] - time.exposed - time.optimizer))
    found = ((nodes, *time_on(nodes, config)) for nodes in NODES)
    return [
        8 * nodes * images / time.total / published
        for (nodes, images, time), published in zip(found, NEMO[kind], strict=True)
    ]


@pytest.mark.parametrize("kind", NEMO)
@pytest.mark.parametrize("images_per_gpu", [64, None], ids=["64 per GPU", "4096 in all"])
def test_nemo_s_scaling_is_predicted_within_10_percent(kind: str, images_per_gpu: int | None) -> None:
    shares = of_nemo(kind, images_per_gpu)
    assert shares[0] == pytest.approx(1, abs=1e-9)
    assert shares == pytest.approx([1] * 5, abs=0.10)


@pytest.mark.parametrize("kind", NEMO)
def test_the_check_fails_on_a_quarter_of_the_network(kind: str) -> None:
    """So it says something about the bandwidth between nodes, if only that it is not much lower."""
    quarter = find_network("", gpu(kind)).cards * 8 / 1e9 / 4
    for images_per_gpu in (64, None):
        assert min(of_nemo(kind, images_per_gpu, f"{quarter:g}")) < 0.90


# ---------------------------------------------------------------------- collectives
@pytest.mark.parametrize(
    ("name", "network", "nodes", "published"),
    [
        ("H100-80GB", "", 1, 370),  # NVIDIA/nccl-tests#212, without NVLink SHARP
        ("A100-40GB", "", 1, 230.8),  # NVIDIA/nccl#527
        ("A100-80GB", "", 4, 192),  # NVIDIA/nccl#812: DGX A100
        ("A100-80GB", "800", 2, 91),  # NVIDIA/nccl-tests#100: 4 x HDR
        ("H100-80GB", "", 4, 8 * 47),  # NVIDIA/nccl-tests#290: 46 to 48 for each card
        ("V100-16GB", "100gbe", 2, 12.2),  # NVIDIA/nccl-tests#29
    ],
)
def test_bandwidth_is_near_what_nccl_tests_measured(name: str, network: str, nodes: int, published: float) -> None:
    assert find_network(network, gpu(name)).bandwidth(nodes) / 1e9 == pytest.approx(published, rel=0.08)


def test_ring() -> None:
    network = Network("", "", link=100e9, cards=50e9)  # bytes/s; 80 and 46 of them are reached
    one = network.seconds("all-reduce", 8e9, 1, 8)
    assert one == pytest.approx(2 * 7 / 8 * 8e9 / 80e9 + 8.4e-6 + 14 * 3.4e-6)
    assert network.seconds("all-gather", 8e9, 1, 8) == pytest.approx(7 / 8 * 8e9 / 80e9 + 8.4e-6 + 7 * 3.4e-6)
    gathered = network.seconds("all-gather", 8e9, 4, 8, calls=3)
    assert gathered == pytest.approx(31 / 32 * 8e9 / 46e9 + 3 * (8.4e-6 + 28 * 3.4e-6 + 3 * 9.6e-6))
    assert network.seconds("reduce-scatter", 8e9, 4, 8, calls=3) == gathered
    # nccl-tests' bus bandwidth of a large message is the link's.
    assert 2 * 31 / 32 * 8e9 / network.seconds("all-reduce", 8e9, 4, 8) == pytest.approx(46e9, rel=0.01)
    assert network.seconds("all-reduce", 8e9, 1, 1) == 0


def test_a_small_all_reduce_takes_the_tree() -> None:
    network = find_network("", H100)
    ring_latency = 2 * (127 * 9.6e-6 + (1023 - 127) * 3.4e-6)
    assert network.seconds("all-reduce", 1e6, 128, 8) < ring_latency / 5


@pytest.mark.slow
def test_one_node_does_not_depend_on_the_network_between_nodes() -> None:
    for stage in (1, 2, 3):
        config = lay_out(load(), stage, False)
        slow, fast = (
            [
                step_time(config, vit(), Cluster(nodes, 8, H100), find_network(rate, H100), 64, 1).total
                for nodes in (1, 4)
            ]
            for rate in ("25gbe", "3200")
        )
        assert slow[0] == fast[0]
        assert slow[1] > 2 * fast[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_more_bandwidth_never_takes_longer(stage: int, accumulation: int) -> None:
    config = lay_out(load(), stage, False)
    for nodes in (2, 16, 128):
        seconds = [
            step_time(config, vit(), Cluster(nodes, 8, H100), find_network(rate, H100), 16, accumulation).total
            for rate in ("10", "25gbe", "100gbe", "400", "1600", "3200")
        ]
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[0] > seconds[3]


@pytest.mark.slow
def test_what_is_hidden() -> None:
    """Nothing below stage 3; there, what the passes leave time for, but never the last bucket of gradients."""
    network = find_network("400", H100)
    for stage in (1, 2):
        time = step_time(lay_out(load(), stage, False), vit(), Cluster(8, 8, H100), network, 64, 1)
        assert time.exposed == time.communication
    sharded = lay_out(load(), 3, False)
    time = step_time(sharded, vit("ViT-G/14"), Cluster(8, 8, H100), network, 64, 1)
    of_last = next(c for c in collectives(sharded, vit("ViT-G/14"), 1) if c.when == "backward's end")
    assert network.seconds(of_last.kind, of_last.bytes, 8, 8) <= time.exposed < 0.7 * time.communication
    slow = step_time(sharded, vit("ViT-G/14"), Cluster(8, 8, H100), find_network("25gbe", H100), 64, 1)
    assert slow.exposed > 0.999999 * (slow.communication - slow.compute) > 0, (
        "the passes hide no more than their own time"
    )


def test_accumulation() -> None:
    """Stage 1 communicates once a step; stages 2 and 3 with every micro-batch."""
    bytes_of = {
        stage: [sum(c.bytes for c in collectives(lay_out(load(), stage, False), vit(), count)) for count in (1, 4)]
        for stage in (1, 2, 3)
    }
    P = num_parameters(vit())
    assert bytes_of[1] == [4 * P, 4 * P]  # all-reduce and all-gather, 2 bytes each
    assert bytes_of[2] == [4 * P, 2 * P + 4 * 2 * P]
    assert bytes_of[3][0] == 4 * P
    assert bytes_of[3][1] == pytest.approx(4 * 4 * P, rel=0.01)


# ---------------------------------------------------------------------- one GPU
def test_traffic_of_a_block() -> None:
    """ViT-L/16's norms, GELU and attention, of 197 tokens and width 1024 in bf16: tensors read and written."""
    one, two = (traffic(configure("ViT-L/16", 224, 1000, depth=depth), 1, torch.bfloat16) for depth in (2, 3))
    forward, backward = (
        {kind: b.bytes[kind] - a.bytes[kind] for kind in a.bytes} for a, b in zip(one, two, strict=True)
    )
    tensor = 2 * 197 * 1024
    assert forward[NORMS] == pytest.approx(2 * 2 * tensor, rel=0.02)  # two norms, each x and y, and their statistics
    assert backward[NORMS] == pytest.approx(2 * 3 * tensor, rel=0.02)
    assert (forward[GELU], backward[GELU]) == (8 * tensor, 12 * tensor)  # 4 x width
    assert (forward[ATTENTION], backward[ATTENTION]) == (4 * tensor, 8 * tensor)
    # 12 D^2 weights; q, k, v, out and the MLP read 1 + 1 + 1 + 1 + 1 + 4 and write 1 + 1 + 1 + 1 + 4 + 1 tensors at most.
    weights = 2 * 12 * 1024**2
    assert weights < forward[MATRICES] < weights + 18.1 * tensor


def test_traffic_grows_with_the_images() -> None:
    for few, many in zip(traffic(vit(), 8, torch.bfloat16), traffic(vit(), 16, torch.bfloat16), strict=True):
        assert many.bytes[GELU] == 2 * few.bytes[GELU]
        assert many.bytes[MATRICES] < 2 * few.bytes[MATRICES], "weights are read once"
        assert many.kernels == few.kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [("R+Ti/16", {"depth": 1}), ("BiT-R50x1", {"units": (1, 1)}), ("Axial-ViT-Ti/16", {"depth": 1})],
)
def test_every_kind_of_model_has_a_time(name: str, changes: dict[str, Any]) -> None:
    forward, backward = passes(load(), configure(name, 64, 10, **changes), H100, 64)
    assert 0 < forward < backward


def test_a_gpu_is_between_its_limits() -> None:
    config, flops = load(), training_flops_per_image(vit()) * 64
    seconds = sum(passes(config, vit(), H100, 64))
    assert seconds > flops / (H100.tflops * 1e12 * EFFICIENCY), "memory traffic takes time, too"
    wider = replace(H100, bandwidth=100 * H100.bandwidth)
    assert sum(passes(config, vit(), wider, 64)) == pytest.approx(flops / (989e12 * EFFICIENCY), rel=0.02)
    recomputed = passes(lay_out(config, 1, True), vit(), H100, 64)  # type: ignore[arg-type]
    assert sum(recomputed) / seconds == pytest.approx(4 / 3, rel=0.05)


def test_few_images_wait_for_launches() -> None:
    one, two = (sum(passes(load(), vit(), H100, images)) for images in (1, 2))
    assert one == two
    assert sum(passes(load(), vit(), H100, 64)) > 10 * one


def test_what_was_measured_replaces_the_prediction() -> None:
    assert sum(passes(load("measured=1000"), vit(), H100, 64)) == pytest.approx(0.064)
    assert not is_predictable(load("engine.precision=fp32"))
    assert is_predictable(load("engine.precision=fp32", "measured=9"))


def test_the_speed_of_a_run_is_that_of_its_plan() -> None:
    """As `launch/plan.py` says for the same layout on 8 servers of 8 GPUs; 0 where a GPU is not known."""
    config = lay_out(load("train.micro_batch=64"), 1, False)
    given = [text for text in REQUIRED if not text.startswith(("samples", "classes"))]
    run = schema.load(RunConfig, None, [*given, "train.micro_batch=64", "engine.zero_stage=1"])
    plan = make_plan(run, 14_200_000, 64)
    speed = predicted_speed(run, plan, vit(), "NVIDIA H100 80GB HBM3", 8)
    assert speed == pytest.approx(
        4096 / step_time(config, vit(), Cluster(8, 8, H100), find_network("", H100), 64, 1).total
    )
    assert predicted_speed(run, plan, vit(), "NVIDIA GTX 1080", 8) == 0.0
    fp32 = schema.load(RunConfig, None, [*given, "engine.precision=fp32"])
    assert predicted_speed(fp32, plan, vit(), "NVIDIA H100 80GB HBM3", 8) == 0.0


def test_optimizer_bytes() -> None:
    P = num_parameters(vit())
    # Stage 2 on 8 ranks: 4 bytes of gradient, 24 of weights and moments, 6 to write bf16 weights, 16 of norm, clipping and
    # zeroing, 10 to add a bf16 gradient to an fp32 one.
    adam = optimizer_bytes(lay_out(load(), 2, False), vit(), 8, 1)
    assert adam == pytest.approx((4 + 24 + 6 + 16 + 10) * P / 8, rel=1e-3)
    averaged = optimizer_bytes(lay_out(load("optimizer.ema_decay=0.999"), 2, False), vit(), 8, 1)
    assert averaged - adam == pytest.approx(12 * P / 8, rel=1e-3)
    # Stage 1 in bf16 keeps the gradients of the whole model on every rank.
    assert optimizer_bytes(load(), vit(), 8, 1) == pytest.approx((16 + 10) * P + (4 + 24 + 6) * P / 8, rel=1e-3)


@pytest.mark.parametrize("name", ["dgx", "0", "-1", "inf", "nan"])
def test_networks_that_are_refused(name: str) -> None:
    with pytest.raises(
        UserError, match=rf"network = {name}: give the Gb/s of a node \(network=400\), or one of: dgx-b300,"
    ):
        find_network(name, H100)


def test_networks() -> None:
    assert find_network("", H100).cards == 400e9
    assert find_network("", gpu("L4")).name == "100gbe"
    assert find_network("50", H100).cards == 6.25e9
    assert (gpu("A100-80GB").bandwidth, gpu("A100-40GB").bandwidth) == (2039e9, 1555e9)
