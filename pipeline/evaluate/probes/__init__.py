"""Few-shot linear and nearest-neighbour accuracy of features.

Part of evaluate/. Called during training, by `launch/evaluate.py`, and by cells of the VTAB sweep.
"""
