"""The processes of a run: run folder, stopping, supervision, host checks, and which samples were in which step.

Imports checkpoint/, objectives/, monitor/, data/, settings/, process/ and base/. Used by train/, experiment/, review/ and launch/.
"""
