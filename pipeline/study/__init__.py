"""Studies: many pre-training runs that answer one question about data, models and compute.

`cells.py` turns a study's settings into its runs, `driver.py` executes them, `results.py` is what is known of each run, `fit.py` and
`report.py` say what follows from it. Imports everything of the library; nothing imports it but launch/study.py.
"""
