"""MLflow as a copy of run folders, by its public client: exporter.py appends a run, models.py its checkpoints; weights
by URI.

connection.py opens a server or a database; refusals.py tells what it refuses from an outage.
Imports files of monitor/, settings/, process/ and data/storage.
Used by most rooms.
"""
