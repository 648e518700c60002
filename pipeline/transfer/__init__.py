"""Transfer of a pre-trained model to new tasks: the grid of settings of a fine-tuning, VTAB-1k's sweep and report.

vtab.py runs a sweep, vtab_cell.py one cell of it; report.py compares sweeps; grid.py searches a learning rate. Imports rooms
above it, but not Ray: the commands pass a function that runs many tasks. data_tools/ uses the list of tasks alone. Used by review/, study/, data_tools/ and launch/.
"""
