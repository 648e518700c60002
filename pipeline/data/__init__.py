"""Data sets on disk and the way of a sample from there into a batch."""
