"""Drawings that explain weights: attention, Grad-CAM, positions, filters, and the most confident mistakes.

explain.py writes them; attention.py, gradcam.py and parameters.py compute, figures.py and galleries.py draw. May import
`evaluate/` and what it imports; called by `launch/explain.py`.
"""
