"""The life of a run's processes: its folder, stopping, supervision, hosts and their check, which samples it saw.

Imports checkpoints, estimates and data. With train/ the only room that may end ranks. Called by train/ and by commands.
"""
