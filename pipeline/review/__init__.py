"""Reads finished and running runs, compares them and reports on them; from their folders, or from MLflow alone.

Imports every room below; called by launch/ only. Start with record.py: what is known of one run.
"""
