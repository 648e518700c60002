"""Reads finished and running runs, compares them and reports on them; from their folders.

Imports rooms above it. Start with record.py (what is known of one run) and table.py (a row for each run). Used by
launch/.
"""
