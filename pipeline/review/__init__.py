"""What people look at after and during runs: comparisons, reports, figures, and the copy of run folders to MLflow.

Reads run folders, or MLflow alone. May import every other room of the library; called by the commands in launch/.
"""
