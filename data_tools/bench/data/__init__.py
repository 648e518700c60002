"""Speed of the loader, of sharding and of augmentation, beside other projects (`peers.py`).

Imports sharding/, sources/ and the files of bench/. Called by `launch/bench.py`.
"""
