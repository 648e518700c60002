"""Studies: many pre-training runs that answer one question about data, models and compute.

`running/` runs the pre-trainings, `results.py` is what is known of each. `curves.py` answers the questions data_size and scaling by the laws
of `law.py`, `variants.py` answers ablation and labels; `points.py` has what both compare. Imports rooms above it. Used by launch/.
"""
