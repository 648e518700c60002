"""Losses: class labels, and what corrupted patches show. Pure functions of tensors and seeds.

Imports models and data/loading (batches, mixing). Called by evaluate/ and train/.
"""
