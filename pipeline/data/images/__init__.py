"""Image files as arrays (H, W, C) of the type that they store: TIFF, PNG, JPEG 2000, JPEG XL, PGM, NumPy and DICOM.

stored.py: `open_image`, what a file holds, and its values. tiff.py, dicom.py, codecs.py and arrays.py read one kind of
file each. 8-bit photographs are decoded by loading/decode.py. Imports architecture/ and base/; imports each library
when its first file is read.
"""
