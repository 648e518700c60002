"""Data sets: manifest, splits, memory-mapped index, exclusion lists, subsets.

Imports storage/ and, of the settings, only quantities. Called by loading/, by every command that opens a data set, and by the
jobs that write one.
"""
