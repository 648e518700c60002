"""What any code may need: errors, JSON records, files and locks, random numbers, words, report pages, galleries of images.

Imports nothing of the other rooms, and no torch. Used by most rooms.
"""
