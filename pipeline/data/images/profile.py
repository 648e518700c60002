"""Looks at the colour profile (ICC) of an image, which training does not apply."""

import functools
import struct

# Red, green and blue of sRGB as ICC profiles hold them, adapted to D50 (IEC 61966-2-1), and the largest difference from
# them: those of Display P3 and Adobe RGB differ by 0.08 and 0.17.
_SRGB = {b"rXYZ": (0.4361, 0.2225, 0.0139), b"gXYZ": (0.3851, 0.7169, 0.0971), b"bXYZ": (0.1431, 0.0606, 0.7141)}
_TOLERANCE = 0.02
_MOST_TAGS = 100


@functools.lru_cache
def has_other_colours(profile: bytes | None) -> bool:
    """Whether the colours of an ICC profile are not sRGB's or gray: by its colour space and primaries, not its tone
    curves.
    """
    if not profile or profile[16:20] == b"GRAY":
        return False
    try:
        (num_tags,) = struct.unpack_from(">I", profile, 128)
        places = dict(struct.iter_unpack(">4sI4x", profile[132 : 132 + 12 * min(num_tags, _MOST_TAGS)]))
        for tag, expected in _SRGB.items():
            primary = (number / 65536 for number in struct.unpack_from(">3i", profile, places[tag] + 8))
            if any(abs(a - b) > _TOLERANCE for a, b in zip(primary, expected, strict=True)):
                return True
    except (struct.error, KeyError):  # Damaged, or of other tags.
        return True
    return False
