"""Offline jobs on data: raw images to shards, verification, near copies of test images, VTAB-1k, benchmarks.

A sharding job goes from source to data set in five steps: list the source (sources/), plan the shards and write each
one as a Ray task (sharding/), merge the manifest (`pipeline.data.dataset`), verify it (check/). `sharding/shard.py`
runs all but the last. progress.py and tasks.py are used by every job. Imports `pipeline`, which never
imports this package; called by `launch/`.
"""
