"""DeepSpeed: the engine that trains under ZeRO, and the average of its weights.

Imports checkpoint/ (tensors), estimate/ (memory), monitor/ (clock), data/loading (batches), objectives/, model/,
settings/, process/ and base/.
`internals.py` is the only file that imports DeepSpeed, and the only one that knows what is not public in it. Used by
train/ and data_tools/.
"""
