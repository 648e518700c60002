"""What a data set is: manifest, splits, the memory-mapped index, exclusion lists, subsets.

Imports storage/. Called by loading/, by every command that opens a data set, and by the jobs that write one.
"""
