"""DeepSpeed: the engine that trains under ZeRO, and where each ZeRO stage keeps weights and optimizer state.

May import: settings, random numbers, distributed, estimate (memory), checkpoint (tensors), monitor (clock).
Called by `pipeline.train` alone. `deepspeed_import.py` is the only file that imports DeepSpeed.
"""
