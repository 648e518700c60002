"""A process and its surroundings: start and signals, console, launchers and ranks, waits, output paths.

Imports base/; only distributed.py imports torch. Used by most rooms.
"""
