"""Drawings that explain weights: attention, Grad-CAM, positions, filters, the most confident mistakes, and similar images; and the images to label first.

explain.py writes them, features.py the table of features and the sheet of similar images, choose.py the images to label, by coverage.py; attention.py, components.py, gradcam.py,
parameters.py and reconstruction.py compute, figures.py and galleries.py draw. Imports evaluate/ and rooms above it. Used by review/ and launch/.
"""
