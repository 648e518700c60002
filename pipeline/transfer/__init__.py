"""From a pre-trained model to new tasks: fine-tuning, its grid of settings, and VTAB-1k's sweep and report.

May import everything above but Ray: the commands hand it a way to run many tasks. Called by `launch/`.
"""
