"""The mean over ranks of tensors that each rank computes, as DeepSpeed's gradient is."""

import importlib

import torch

from pipeline.objectives.parts.across_ranks import summed


def save(argument: tuple[str, str]) -> None:
    """In a rank: calls "module:function"(rank, ranks), which returns tensors by name, and saves their means in a file.
    argument: both.
    """
    module, _, function = argument[0].partition(":")
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tensors = getattr(importlib.import_module(module), function)(rank, ranks)
    found = {name: summed(value) / ranks for name, value in tensors.items()}
    if rank == 0:
        torch.save(found, argument[1])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
