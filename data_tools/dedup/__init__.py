"""Pre-training images that are near copies of test images: thumbnails, search, verification of pairs, a sheet to judge by.

Imports sharding/. Called by `launch/dedup.py`.
"""
