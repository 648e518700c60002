"""Losses of classification and of masked patch prediction. Pure functions of tensors and seeds.

Imports pipeline.model and pipeline.data.loading (batches, mixing). Used by evaluate/ and train/.
"""
