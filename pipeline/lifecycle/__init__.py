"""The processes of a run: run folder, stopping, supervision, host checks, and which samples were in which step.

Imports checkpoint/, estimate/ and data/. Used by train/, transfer/, review/, study/ and launch/.
"""
