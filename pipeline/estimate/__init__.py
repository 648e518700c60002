"""Before a run: batch arithmetic, lengths in steps, FLOPs, memory, layouts on a cluster, hours and cost.

Imports models and data sets, never training. Called by `launch/plan.py`, and by training for its plan and its refusals.
"""
