"""Segmentation by a linear layer on frozen patch tokens: what the features say of each place of an image.

Imports what evaluate/ may import; `run` in run.py is the entry point. Used by launch/ and review/.
"""
