"""How long a collective call may take, in all process groups."""

import torch
from forked import Forge

from pipeline.process.distributed import from_environment
from pipeline.train.zero.engine import limit_collectives, start_ranks


def show_limits(minutes: float) -> None:
    """In a rank: prints the timeouts of the world's group, and of the one that ZeRO reduces gradients in."""
    from deepspeed.utils import groups

    start_ranks(from_environment())
    found = [torch.distributed.group.WORLD, groups._get_data_parallel_group()]
    limit_collectives(minutes)
    print("limits", [str(group._get_backend(torch.device("cpu")).options._timeout) for group in found], flush=True)


def test_groups_that_deepspeed_makes_have_the_limit_too(forge: Forge) -> None:
    assert "limits ['0:40:00', '0:40:00']" in forge.start_work(2, "test_group_timeouts:show_limits", 40.0).finish()
