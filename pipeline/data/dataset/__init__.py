"""Data sets: manifest, splits, memory-mapped index, exclusion lists, subsets.

Imports storage/, base/ and, of the settings, only quantities. Used by most rooms.
"""
