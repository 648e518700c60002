"""Networks of clusters, and how long a collective takes on them.

The formulas are those with which NCCL itself chooses an algorithm (NVIDIA/nccl, src/graph/tuning.cc, with its latencies).

Letters: n ranks on m nodes, V bytes of the full tensor, B bytes/s of the slowest link of a ring.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pipeline.base.errors import UserError
from pipeline.monitor.gpus import Gpu

Kind = Literal["all-reduce", "reduce-scatter", "all-gather"]

# Gb/s of all network cards of a node together, one direction, as far as the GPUs can use them; and where that number is from.
_NETWORKS = {
    "dgx-b300": (6400, "data sheet of DGX B300: 8 x 800 Gb/s"),
    "dgx-b200": (3200, "data sheet of DGX B200: 8 x 400 Gb/s"),
    "dgx-h100": (3200, "data sheet of DGX H100 and H200: 8 x NDR, 400 Gb/s"),
    "dgx-a100": (1600, "data sheet of DGX A100: 8 x HDR, 200 Gb/s"),
    "aws-p5": (3200, "Amazon EC2, P5: 3,200 Gb/s EFA"),
    "aws-p4d": (400, "Amazon EC2, P4d: 400 Gb/s EFA"),
    "gcp-a3-ultra": (3200, "Google Cloud, A3 Ultra: 8 x 400 Gb/s for GPUs"),
    "gcp-a3-mega": (1600, "Google Cloud, A3 Mega: 8 x 200 Gb/s for GPUs"),
    "gcp-a3-high": (800, "Google Cloud, A3 High: 4 x 200 Gb/s for GPUs"),
    "gcp-a2": (100, "Google Cloud, A2: 100 Gb/s"),
    "100gbe": (100, "one Ethernet card"),
    "25gbe": (25, "one Ethernet card"),
}
# The usual server of a GPU; the others of the table get 100 Gb/s Ethernet.
_USUAL = {
    "B300": "dgx-b300",
    "B200": "dgx-b200",
    "H200": "dgx-h100",
    "H100": "dgx-h100",
    "H800": "dgx-h100",
    "H20": "dgx-h100",
    "H20 3e": "dgx-h100",
    "A100": "dgx-a100",
    "A800": "dgx-a100",
}

# Share of the line rate that large collectives reach. Published (nccl-tests' bus bandwidth of line rate, in GB/s): NVLink 370 of
# 450 on H100 (NVIDIA/nccl-tests#212), 231 of 300 on A100 (NVIDIA/nccl#527); network cards 192 of 200 (NVIDIA/nccl#812),
# 91 of 100 (NVIDIA/nccl-tests#100), 46 to 48 of 50 each (#290), 12.2 of 12.5 (#29).
_LINK_SHARE = 0.8
_CARD_SHARE = 0.92

# Seconds of NCCL's protocol "simple": start of a ring, a step of it inside and between nodes; the same of a tree.
_START, _RING_INSIDE, _RING_BETWEEN = 8.4e-6, 3.4e-6, 9.6e-6
_TREE_INSIDE, _TREE_BETWEEN = 28e-6, 50e-6
_TREE_SHARE = 0.9  # of a ring's bandwidth


@dataclass(frozen=True)
class Network:
    """The links of a cluster, in bytes/s and direction. link: of a GPU inside its node. cards: of a node, all together."""

    name: str
    source: str
    link: float
    cards: float

    def bandwidth(self, nodes: int) -> float:
        """B: what a ring over so many nodes reaches, as nccl-tests' bus bandwidth."""
        inside = _LINK_SHARE * self.link
        return inside if nodes == 1 else min(inside, _CARD_SHARE * self.cards)

    def seconds(self, kind: Kind, num_bytes: float, nodes: int, gpus_per_node: int, calls: int = 1) -> float:
        """Duration of `calls` collectives that together move `num_bytes` of full tensors, one after the other.

        Ring: (n - 1) / n V / B for a reduce-scatter or an all-gather, twice that for an all-reduce, and the latency of n - 1
        or 2 (n - 1) steps. An all-reduce may go along a tree instead, which has fewer steps: NCCL takes the faster.
        """
        n = nodes * gpus_per_node
        if n == 1 or not num_bytes:
            return 0.0
        bandwidth, rounds = self.bandwidth(nodes), 2 if kind == "all-reduce" else 1
        between = nodes - 1
        latency = _START + rounds * ((n - 1 - between) * _RING_INSIDE + between * _RING_BETWEEN)
        ring = rounds * (n - 1) / n * num_bytes / bandwidth + calls * latency
        if kind != "all-reduce" or nodes == 1:
            return ring
        depth = 2 * ((gpus_per_node - 1) * _TREE_INSIDE + math.floor(math.log2(nodes)) * _TREE_BETWEEN)
        return min(ring, 2 * num_bytes / (_TREE_SHARE * bandwidth) + calls * depth)


def find_network(name: str, gpu: Gpu) -> Network:
    """Returns a network by its name in the table or its Gb/s per node; "" is that of the GPU's usual server.

    Raises UserError for an unknown name.
    """
    usual = name or _USUAL.get(gpu.kind, "100gbe")
    if usual in _NETWORKS:
        rate, source = _NETWORKS[usual]
        return Network(usual, source + ("" if name else f"; assumed for {gpu.kind}"), gpu.link, rate / 8 * 1e9)
    try:
        rate_given = float(name)
    except ValueError:
        rate_given = 0.0
    if not 0 < rate_given < math.inf:
        raise UserError(
            f"network = {name}: give the Gb/s of a node (network=400), or one of: {', '.join(_NETWORKS)}."
        ) from None
    return Network(f"{rate_given:g} Gb/s", "given in the settings", gpu.link, rate_given / 8 * 1e9)
