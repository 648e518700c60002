"""Image files as arrays (H, W, C) of the type that they store: TIFF, PNG, JPEG 2000, JPEG XL, PGM, HEIC, NumPy and
DICOM.

formats.py: `open_image`, by the first bytes of a file. stored.py: what a file holds, and its values. tiff.py, dicom.py,
codecs.py, heic.py and arrays.py each read some formats. Other 8-bit photographs are decoded by loading/decode.py.
Imports architecture/ and base/; imports each library when its first file is read.
"""
