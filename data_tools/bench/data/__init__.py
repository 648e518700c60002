"""Speed of the loader beside other projects (`peers.py`).

Imports sharding/, sources/ and the files of bench/. Called by `launch/bench.py`.
"""
