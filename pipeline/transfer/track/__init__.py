"""Sends sweeps, grids and studies to MLflow: a parent run with figures, below which the runs of a grid and of a study are shown.

parent_page.py is what they share; sweep_page.py and grid_page.py say what the pages of a VTAB sweep and of a fine-tuning grid show;
figures.py draws accuracy by learning rate. Imports what transfer/ may import. Used by transfer/, study/ and launch/.
"""
