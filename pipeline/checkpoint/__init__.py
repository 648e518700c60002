"""Checkpoints: atomic store, sharded tensors, the copy to host memory that training waits for, the writer process.

Imports data/storage for object stores; knows nothing of DeepSpeed, and of models only the names of LoRA's factors. Used
by cluster/, objectives/, train/, experiment/ and review/.
"""
