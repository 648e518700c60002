"""Studies: many pre-training runs that answer one question about data, models and compute.

`running/` runs the pre-trainings, `results.py` is what is known of each, `laws/` are fitted to results, `report/` says what follows. Imports
rooms above it; of its own rooms, running/ imports report/, which imports laws/. Used by launch/.
"""
