"""Pictures of what is inside weights: attention, Grad-CAM, positions, filters, the most confident mistakes.

Takes a loaded model and images from evaluate/. Called by `launch/explain.py`.
"""
