"""What tells images apart by their bytes."""

import xxhash

HASH_BYTES = 16


def content_hash(data: bytes) -> bytes:
    """16 bytes, XXH3-128 of an image file: the manifest's column `xxh128`.

    For equal files and damage, not against forgery: it takes a twentieth of the time of SHA-256, which the shards have.
    """
    return xxhash.xxh3_128_digest(data)
