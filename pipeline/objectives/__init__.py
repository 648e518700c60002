"""Losses of classification and of masked patch prediction. Pure functions of tensors and seeds.

May import pipeline.model and pipeline.data.loading (batches, mixing). Called by evaluate/, train/ and transfer/.
"""
