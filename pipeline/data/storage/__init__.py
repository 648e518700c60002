"""Files on disks and in buckets: object store, retries, shard cache, remembered checksums, atomic replacement.

Imports the ground floor only. Used by most rooms.
"""
