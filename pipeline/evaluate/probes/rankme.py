"""RankMe and the standard deviation of features: without labels, whether features differ from image to image.

Shapes: n images, D features.
"""

from collections.abc import Mapping

import numpy as np

from pipeline.evaluate.classify import Features

_EPSILON = 1e-7  # RankMe's, for float32 embeddings.
# A RankMe below 2 is less than two equal directions, which tell at most two groups of images apart.
_COLLAPSED_RANKME = 2.0
# SimSiam's figure 2 shows 0 for a collapse, and about 1 without one. Rounding features to bfloat16 alone gives about
# 0.001.
_COLLAPSED_STD = 0.01


def rankme(features: np.ndarray) -> float:
    """RankMe of features (n, D): from about 1, for a collapse, to min(n, D) (Garrido et al. 2023, arXiv 2210.02885,
    equation 1).

    The exponential of the entropy of the singular values, each divided by their sum, plus 1e-7. As there, the features
    are not
    centred: the same vector for all images is a rank of 1. NaN for no images.
    """
    if not len(features):
        return float("nan")
    values = np.linalg.svd(features.astype(np.float64), compute_uv=False)
    shares = values / max(values.sum(), np.finfo(np.float64).tiny) + _EPSILON
    return float(np.exp(-(shares * np.log(shares)).sum()))


def feature_std(features: np.ndarray) -> float:
    """Standard deviation over images of features (n, D) of length 1, mean over D, times sqrt(D); NaN for no images.

    0: all images have the same features. 1: they point evenly in all directions (SimSiam, arXiv 2011.10566, section
    4.1, which compares the deviation with 1 / sqrt(D)).
    """
    if not len(features):
        return float("nan")
    wide = features.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    unit = wide / np.maximum(lengths, np.finfo(np.float64).tiny)
    return float(unit.std(0).mean() * np.sqrt(wide.shape[1]))


def spread(features: Features) -> dict[str, float]:
    """Both of the readable and finite features: {"rankme", "feature_std", "images": how many these are, "dimensions":
    D}.
    """
    usable = features.values[features.usable]
    return {
        "rankme": rankme(usable),
        "feature_std": feature_std(usable),
        "images": len(usable),
        "dimensions": features.values.shape[1],
    }


def collapse(found: Mapping[str, float]) -> str:
    """What has collapsed and what to change, as one sentence, if the numbers of `spread` show it; else ""."""
    if found["feature_std"] >= _COLLAPSED_STD and found["rankme"] >= _COLLAPSED_RANKME:
        return ""
    if not found["images"]:
        return ""
    return (
        f"RankMe {found['rankme']:.4g} of at most {min(found['images'], found['dimensions']):,}, deviation of the"
        f" features {found['feature_std']:.2g}: all images have nearly the same features. Lower optimizer.lr, use a"
        " longer schedule.warmup or engine.precision=fp32, and begin again from a checkpoint before it."
    )
