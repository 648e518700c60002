"""Speed of reading and writing data, side by side with what else does it (`launch/bench.py`)."""
