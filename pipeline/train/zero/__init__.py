"""DeepSpeed: the engine that trains under ZeRO, and where each ZeRO stage keeps weights and optimizer state.

Imports checkpoint/ (tensors), estimate/ (memory), monitor/ (clock), data/loading (batches), objectives/, model/, settings/, process/
and base/.
`deepspeed_import.py` is the only file that imports DeepSpeed. Used by train/ and data_tools/.
"""
