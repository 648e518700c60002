"""What any code may need: errors, what weights were trained on, JSON records, files and locks, random numbers, words,
report pages, galleries of images.

Imports nothing of the other rooms, and no torch. Used by most rooms.
"""
