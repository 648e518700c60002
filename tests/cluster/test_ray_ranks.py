"""Ranks as child processes: their environment, their output, and how their exit codes become one."""

import pytest

from pipeline.base.errors import UserError
from pipeline.cluster.ray_tasks import (
    RankPlacement,
    RankProcess,
    local_gpu,
    rank_environments,
    ranks_that_fit,
    wait_for_ranks,
)


def test_each_rank_finds_its_place_in_the_environment() -> None:
    places = [RankPlacement("10.0.0.1", -1, 29500), RankPlacement("10.0.0.2", -1), RankPlacement("10.0.0.1", -1)]
    found = rank_environments(places, cpus=2)
    assert [(one["RANK"], one["LOCAL_RANK"], one["LOCAL_SIZE"]) for one in found] == [
        ("0", "0", "2"),
        ("1", "0", "1"),
        ("2", "1", "2"),
    ]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"], one["MASTER_PORT"], one["OMP_NUM_THREADS"]) for one in found} == {
        ("3", "10.0.0.1", "29500", "2")
    }
    # With GPUs the local rank is the GPU's number, in whatever order they were given out.
    on_gpus = rank_environments([RankPlacement("a", 3), RankPlacement("a", 1)], cpus=1)
    assert [one["LOCAL_RANK"] for one in on_gpus] == ["3", "1"]


def test_the_local_rank_is_the_gpu_as_cuda_counts_it() -> None:
    assert [local_gpu(identity, "2,3") for identity in ("2", "3")] == [0, 1]
    assert local_gpu("GPU-b1", "GPU-a0, GPU-b1") == 1
    assert [local_gpu("3", visible) for visible in (None, "")] == [3, 3]


def test_ranks_fit_into_nodes_not_into_their_sum() -> None:
    two = [("10.0.0.1", {"CPU": 3.0}), ("10.0.0.2", {"CPU": 3.0})]
    assert ranks_that_fit(two, 0, 2) == (2, {"CPU": 2})
    with pytest.raises(UserError) as error:
        ranks_that_fit(two, 3, 2)
    assert "so 2 fit: 1 on 10.0.0.1, 1 on 10.0.0.2." in str(error.value)
    with pytest.raises(UserError, match="needs 4 CPUs of one node, so 0 fit"):
        ranks_that_fit(two, 0, 4)
    # A GPU's rank needs a CPU of that node, too; nodes without GPUs have none.
    assert ranks_that_fit([("a", {"CPU": 4.0, "GPU": 8.0}), ("b", {"CPU": 64.0})], 0, 9) == (4, {"CPU": 1, "GPU": 1})


@pytest.mark.parametrize("stop", [False, True])
def test_a_rank_that_fails_ends_the_wait_with_its_last_lines(stop: bool) -> None:
    waits, fails = RankProcess(), RankProcess()
    waits.start(["-c", "import time; print('begun'); time.sleep(600)"], {"RANK": "0"})
    fails.start(
        ["-c", "import os, time; print('no disk'); time.sleep(600 * int(os.environ['WAIT'])); exit(7)"],
        {"RANK": "1", "WAIT": str(int(stop))},
    )
    ranks, said = [waits, fails], list[str]()

    def terminate() -> None:
        for rank in ranks:
            rank.terminate()

    def stopping() -> bool:
        return stop and "begun" in said

    code = wait_for_ranks(
        2, lambda: [rank.poll() for rank in ranks], terminate, said.append, stopping, 300 if stop else 0
    )
    if stop:
        assert code == 15
        assert "rank 0 ended with exit code -15" in said
    else:
        assert code == 7
        assert [line for line in said if "rank 1" in line] == ["rank 1: no disk", "rank 1 ended with exit code 7"]
        assert waits.poll()[1] is None
    waits.process.kill()


def test_ranks_that_leave_a_mistake_to_rank_0_are_ended_when_it_has_said_it() -> None:
    says, waits = RankProcess(), RankProcess()
    says.start(["-c", "print('error: no data'); exit(2)"], {"RANK": "0"})
    waits.start(["-c", "import time; time.sleep(600)"], {"RANK": "1"})
    said: list[str] = []
    assert wait_for_ranks(2, lambda: [says.poll(), waits.poll()], waits.terminate, said.append, lambda: False, 300) == 2
    assert "error: no data" in said
