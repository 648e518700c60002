"""Ray, and the only room that imports it: connect to a cluster, run many tasks or the ranks of a training there.

Imports process/, data/storage/ (paths) and settings/. Used by data_tools/, experiment/ and launch/.
"""

from pipeline.cluster.ray_tasks.cluster import capacity, connect, disconnect, shared_path
from pipeline.cluster.ray_tasks.ranks import run_ranks
from pipeline.cluster.ray_tasks.tasks import LostError, RunJobs, run_here, run_tasks

__all__ = [
    "LostError",
    "RunJobs",
    "capacity",
    "connect",
    "disconnect",
    "run_here",
    "run_ranks",
    "run_tasks",
    "shared_path",
]
