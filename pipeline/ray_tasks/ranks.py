"""Runs the ranks of a training on a Ray cluster, each in an actor."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.errors import CrashError, Stopped, UserError
from pipeline.base.words import counted
from pipeline.process.rank_process import (
    RankPlacement,
    RankProcess,
    amounts,
    local_gpu,
    rank_environments,
    ranks_that_fit,
    wait_for_ranks,
)
from pipeline.process.waits import waiting
from pipeline.ray_tasks.cluster import first_line

# Interval at which a wait for resources looks for a request to stop, in seconds.
_POLL_SECONDS = 0.5


class _RankActor(RankProcess):
    def place(self) -> RankPlacement:
        import ray

        gpus = ray.get_gpu_ids()
        gpu = local_gpu(str(gpus[0]), os.environ.get("CUDA_VISIBLE_DEVICES")) if gpus else -1
        return RankPlacement(ray.util.get_node_ip_address(), gpu)


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    cpus: int,
    say: Callable[[str], None],
    stopping: Callable[[], bool],
    wait_minutes: float = 10.0,
    inputs: Mapping[str, str] | None = None,
) -> int:
    """Run a Python command as the ranks of one process group, each in an actor; returns the largest exit code.

    command: Python's arguments (a script, or -m and a module, and its settings); it finds RANK, LOCAL_RANK, ... in its environment, as under any other launcher.
    num_ranks: 0 is as many as fit: one per GPU, or per `cpus` CPUs if the cluster has no GPU.
    say: called with the ranks' nodes, and as in `wait_for_ranks`. stopping: True once the ranks are to be stopped by SIGTERM,
    after which they exit by themselves. A rank that fails, or whose node dies, ends the others, which would wait for it.
    wait_minutes: how long to wait for resources that other jobs hold. inputs: local path -> how the command names it, of what the ranks read.
    Raises UserError when the ranks do not fit, their resources do not become free, or a node lacks the script or an input; CrashError
    when a rank is lost; Stopped if `stopping` before they run.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = [(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    num_ranks, share = ranks_that_fit(nodes, num_ranks, cpus)

    def get(references: Any, what: str, limit: UserError) -> Any:
        """The results; what, limit: what is waited for, and the error after wait_minutes."""
        with waiting(what, 60 * wait_minutes, "--wait-minutes", say=say) as wait:
            while ray.wait(references, num_returns=len(references), timeout=_POLL_SECONDS)[1]:
                if stopping():
                    raise Stopped
                if wait.left <= 0:
                    raise limit
        return _get_from_rank(references)

    def poll() -> list[tuple[list[str], int | None]]:
        return _get_from_rank([actor.poll.remote() for actor in actors])

    def terminate() -> None:
        for actor in actors:
            actor.terminate.remote()

    actors: list[Any] = []
    group = placement_group([share] * num_ranks, strategy="PACK")
    try:
        needed = amounts({name: num_ranks * amount for name, amount in share.items()})
        free = ray.available_resources()
        left = amounts({name: free.get(name, 0) for name in share})
        busy = UserError(
            f"the resources of {counted(num_ranks, 'rank')} ({needed}) did not become free within {wait_minutes:g} minutes (--wait-minutes); when "
            f"this began, these were: {left}. End other jobs, use fewer --ranks, or wait longer."
        )
        get([group.ready()], f"{needed}, of which other jobs hold some (free: {left})", busy)
        # Each rank sees all GPUs of its host and uses that of its LOCAL_RANK: NCCL's peer-to-peer copies need both GPUs visible.
        visible = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        actors = [
            ray.remote(_RankActor)
            .options(
                num_cpus=share["CPU"],
                num_gpus=share.get("GPU", 0),
                max_concurrency=2,
                runtime_env=visible,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            )
            .remote()
            for number in range(num_ranks)
        ]
        late = UserError("Ray did not start the processes of the ranks. See its logs (ray logs) for the cause.")
        places = get([actor.place.remote() for actor in actors], "Ray to start a process for each rank", late)
        script = {} if command[0].startswith("-") else {command[0]: command[0]}
        read = {**script, **(inputs or {})}
        absent = _get_from_rank([actor.missing.remote([*read]) for actor in actors])
        for place, missing in zip(places, absent, strict=True):
            if missing:
                raise _missing_input(read[missing[0]], missing[0], place.address)
        port = _get_from_rank(actors[0].free_port.remote())
        for rank, (actor, variables) in enumerate(zip(actors, rank_environments(places, port, cpus), strict=True)):
            say(f"rank {rank} on {places[rank].address}, {variables['LOCAL_RANK']} of {variables['LOCAL_SIZE']} there")
            _get_from_rank(actor.start.remote(list(command), variables))
        return wait_for_ranks(num_ranks, poll, terminate, say, stopping)
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _missing_input(named: str, path: str, address: str) -> UserError:
    if Path(path).is_absolute():
        return UserError(f"{named} is missing on {address}. Put it on storage that all nodes share.")
    return UserError(
        f"{named} is not in the folder where Ray's processes run on {address}. Start this command by `ray job submit --working-dir . -- "
        "python launch/ray_run.py ...`, which sends this folder to all nodes, or give an absolute path on storage that they share."
    )


def _get_from_rank(references: Any) -> Any:
    """Raises CrashError when an actor or its node died."""
    import ray

    try:
        return ray.get(references)
    except ray.exceptions.RayError as error:
        raise CrashError(f"a rank is lost: {first_line(error)} Run the same command again to continue.") from None
