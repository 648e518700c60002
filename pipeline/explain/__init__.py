"""Drawings that explain weights: attention, Grad-CAM, positions, filters, and the most confident mistakes.

explain.py writes them; attention.py, gradcam.py and parameters.py compute, figures.py and galleries.py draw. Imports
evaluate/ and rooms below it. Used by review/ and launch/.
"""
