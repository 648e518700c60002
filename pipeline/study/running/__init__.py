"""The runs of a study: `cells.py` turns its settings into them, `identity.py` is what it must not change, `cost.py` says what they cost, `driver.py` executes them by `cell_run.py`.

`slurm.py` writes a script that does so on a cluster, `study_page.py` shows them in MLflow. Imports the rest of study/ and rooms below it. Used by launch/.
"""
