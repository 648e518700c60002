"""The questions of studies, a file each, found by its name (docs/studies.md). Imports the rest of experiment/. Used by
experiment/study.py.
"""
