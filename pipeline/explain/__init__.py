"""Drawings that explain weights: attention, positions, filters, and the most confident mistakes.

explain.py writes them; attention.py, components.py, parameters.py and reconstruction.py compute, figures.py and
galleries.py draw. Imports evaluate/ and rooms above it. Used by review/ and launch/.
"""
