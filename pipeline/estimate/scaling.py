"""A run on 1 to 128 nodes: the layout that fits, the time of a step and its parts, and how far adding nodes pays."""

from dataclasses import dataclass, replace
from itertools import takewhile

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.estimate.cluster import Cluster, choose, lay_out
from pipeline.estimate.network import Network
from pipeline.estimate.plan import cut_batch
from pipeline.estimate.step_time import StepTime, step_time
from pipeline.model import Config
from pipeline.settings.commands.operate import PlanConfig

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
# Share of the smallest cluster's speed per GPU above which adding nodes is advised. A choice, not a finding.
_WORTH = 0.8


@dataclass(frozen=True)
class ScalingRow:
    """A number of nodes. time: None if the run is impossible there, for the reason `why`.

    efficiency: images/s per GPU, as a share of that of the first possible row.
    """

    nodes: int
    num_gpus: int
    why: str = ""
    zero_stage: int = 0
    activation_checkpointing: bool = False
    micro_batch: int = 0
    accumulation: int = 0
    time: StepTime | None = None
    images_per_second: float = 0.0
    efficiency: float = 0.0


def scaling(config: PlanConfig, model: Config, cluster: Cluster, network: Network) -> list[ScalingRow]:
    """Returns a row for each of NODES and for the cluster's own number, each in the layout that is advised there."""
    rows: list[ScalingRow] = []
    first = 0.0
    undivided = replace(config, train=replace(config.train, micro_batch=config.train.global_batch))
    for nodes in sorted({*NODES, cluster.nodes}):
        there = replace(cluster, nodes=nodes)
        why = "the batch cannot be divided"
        try:
            cut_batch(undivided, there.num_gpus)
            why = "does not fit"
            choice = choose(config, model, there)
        except UserError:
            rows.append(ScalingRow(nodes, there.num_gpus, why))
            continue
        accumulation, micro_batch = choice.accumulation, choice.micro_batch
        chosen = lay_out(config, choice.zero_stage, choice.activation_checkpointing)
        time = step_time(chosen, model, there, network, micro_batch, accumulation)
        rate = config.train.global_batch / time.total
        first = first or rate / there.num_gpus
        row = ScalingRow(
            nodes, there.num_gpus, "", choice.zero_stage, choice.activation_checkpointing, micro_batch, accumulation
        )
        rows.append(replace(row, time=time, images_per_second=rate, efficiency=rate / there.num_gpus / first))
    return rows


def advice(rows: list[ScalingRow]) -> str:
    """How far adding nodes pays, in one sentence."""
    possible = [row for row in rows if row.time]
    if not possible:
        return "No number of nodes is possible."
    worth = list(takewhile(lambda row: row.efficiency >= _WORTH, possible))
    last = worth[-1]  # The first row has an efficiency of 1.
    if len(worth) == len(possible):
        return f"On up to {counted(last.nodes, 'node')}, a GPU keeps at least {_WORTH:.0%} of the speed that it has on {possible[0].nodes}."
    too_many = possible[len(worth)]
    assert too_many.time
    communicates = too_many.time.exposed / too_many.time.total
    return (
        f"Use {'' if last.nodes == 1 else 'at most '}{counted(last.nodes, 'node')}: on {too_many.nodes}, a GPU has {too_many.efficiency:.0%} of the speed that it has on "
        f"{possible[0].nodes} ({counted(too_many.micro_batch * too_many.accumulation, 'image')} a GPU and step; it waits "
        f"{communicates:.0%} of the time for communication)."
    )
