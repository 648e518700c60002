"""Estimates a run before it starts: batch arithmetic, lengths in steps, FLOPs, memory, layout on a cluster, hours, cost.

Imports models and data sets, never training. Called by `launch/plan.py`, and by training for its plan and memory checks.
"""
