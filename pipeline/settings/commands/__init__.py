"""The settings of all commands but a run's own: one file for each kind of command.

Imports the files beside this folder. Used by most rooms.
"""
