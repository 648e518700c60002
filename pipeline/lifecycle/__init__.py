"""The processes of a run: run folder, stopping, supervision, host checks, and which samples were in which step.

May import checkpoint/, estimate/ and data/. Only this room and train/ may end ranks. Called by train/ and by commands.
"""
