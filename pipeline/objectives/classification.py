"""Classification losses of pre-training and fine-tuning. Shapes: B batch, K classes, M labels per sample."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.data.loading.mix import mix_pairs


def targets(labels: Tensor, num_classes: int) -> Tensor:
    """Multi-hot targets, float32 (B, K), of labels int64 (B, M), -1 where a sample has fewer than M."""
    hot = torch.zeros((labels.shape[0], num_classes + 1), dtype=torch.float32, device=labels.device)
    # Missing labels go into an extra column, which is dropped.
    hot.scatter_(1, torch.where(labels < 0, num_classes, labels), 1.0)
    return hot[:, :num_classes]


def losses(
    logits: Tensor, labels: Tensor, kind: str, label_smoothing: float = 0.0, own: Tensor | None = None
) -> Tensor:
    """Loss per sample, float32 (B,), from logits (B, K) and labels int64 (B, M).

    kind "softmax": cross-entropy with the mean of the labels, smoothed over all classes. "sigmoid": binary cross-entropy
    summed over the classes, as the paper's authors train on multi-label data (big_vision, configs/vit_i21k.py).
    own: for a batch mixed in pairs, weight of each sample's own labels, float32 (B,) (`data/loading/mix.py`).
    """
    logits = logits.float()
    target = targets(labels, logits.shape[1])
    if kind == "softmax":
        target = target / target.sum(1, keepdim=True).clamp(min=1)
    if own is not None:
        target = mix_pairs(target, own)
    if kind == "sigmoid":
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1)
    target = target * (1 - label_smoothing) + label_smoothing / logits.shape[1]
    return -(target * F.log_softmax(logits, dim=1)).sum(1)


def batch_loss(
    logits: Tensor, labels: Tensor, valid: Tensor, kind: str, label_smoothing: float, own: Tensor | None = None
) -> Tensor:
    """Mean over the B places of the batch, a scalar; samples that are not `valid`, bool (B,), count as zero."""
    return (losses(logits, labels, kind, label_smoothing, own) * valid).sum() / valid.shape[0]
