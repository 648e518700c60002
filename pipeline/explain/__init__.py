"""Drawings that explain weights: attention, Grad-CAM, positions, filters, and the most confident mistakes.

explain.py writes them; attention.py, components.py, gradcam.py, parameters.py and reconstruction.py compute, figures.py and galleries.py draw. Imports evaluate/ and rooms above it. Used by review/ and launch/.
"""
