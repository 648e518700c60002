"""Files on disks and in buckets: object store, retries, shard cache, remembered checksums, atomic replacement.

Imports base/ and process/ only. Used by most rooms.
"""
