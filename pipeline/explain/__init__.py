"""Drawings that explain weights: attention, positions, filters, and the most confident mistakes.

explain.py writes them; attention.py, parameters.py and reconstruction.py compute, galleries.py draws.
Imports evaluate/ and rooms above it. Used by review/ and launch/.
"""
