"""Studies: many pre-training runs that answer one question about data, models and compute.

`cells.py` turns a study's settings into its runs, `cost.py` says what they cost, `driver.py` executes them by `cell_run.py`, `results.py`
is what is known of each. `fit.py` fits power laws, `answers.py` says what follows, `sentences.py`, `figures.py` and `report.py` show it. Imports rooms
below it. Used by launch/.
"""
