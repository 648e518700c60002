"""Experiments: many runs that answer one question. Each is a list of runs (spec.py) and one engine (engine.py), which
does those that are not done and keeps what a started experiment must not change.

`table.py` is the table of its runs, `plan.py` its cost, `page.py` what MLflow shows of it. `grid.py`
chooses a learning rate, `vtab.py` scores weights on VTAB-1k, `study.py` asks the `questions/` of pre-trainings, with
the mathematics of law.py and points.py. Imports rooms above it. Used by review/, data_tools/ and launch/.
"""
