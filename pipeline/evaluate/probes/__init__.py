"""Few-shot linear and nearest-neighbour accuracy of features.

May import what evaluate/ may. Called by train/ during a run, by evaluate/report.py, and by transfer/ for VTAB.
"""
