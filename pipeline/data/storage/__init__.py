"""Files on disks and in buckets: object store, retries, shard cache, checksums, atomic replacement.

Imports base/ and process/ only. Used by most rooms.
"""
