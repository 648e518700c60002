"""Estimates a run before it starts: batch arithmetic, lengths in steps, FLOPs, memory, layout on a cluster, hours.

Imports models, data sets, objectives/ and monitor/, never training. Used by cluster/, train/, experiment/, data_tools/
and launch/.
"""
