"""Sends sweeps and grids to MLflow: a parent run with a summary figure, and a child run for each cell or run.

children.py sends child runs; sweep_page.py and grid_page.py say what the pages of a VTAB sweep and of a fine-tuning grid show;
figures.py draws accuracy by learning rate. Imports what transfer/ may import. Used by transfer/, study/ and launch/.
"""
