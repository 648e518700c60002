"""MLflow as a copy of run folders, by its public client: exporter.py appends a run and its checkpoints; weights by URI.

connection.py opens a server or a database, and tells what it refuses from an outage.
Imports files of monitor/, settings/, process/ and base/. Used by most rooms.
"""
