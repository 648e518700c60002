"""Weighted nearest neighbours of features (Wu et al. 2018, arXiv 1805.01978), as in dino/eval_knn.py.

Shapes: n training samples, m test samples, D features, K classes, k neighbours.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

# Test samples that are compared with all training samples at a time: as many, but those of fewer similarities.
_CHUNK, _MAX_SIMILARITIES = 1024, 2**26


@torch.no_grad()
def knn_predict(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    num_classes: int,
    k: int,
    temperature: float,
) -> Tensor:
    """Votes for each class, float32 (m, K): each of the k most similar training samples votes with exp(cosine /
    temperature).

    DINO has k = 20 (arXiv 2104.14294, section 4.1) and a temperature of 0.07 (dino/eval_knn.py).
    train_features: float (n, D); train_labels: int64 (n,), 0 to K - 1; test_features: float (m, D); all on one device.
    Features are normalised here. With fewer than k training samples all of them vote. The votes of a row are divided by
    its largest single vote, which keeps their order and prevents an overflow at low temperatures.
    Similarities take 256 MiB at a time.
    """
    k = min(k, len(train_features))
    train = normalize(train_features.float())
    scores = torch.zeros(len(test_features), num_classes, device=test_features.device)
    chunk = min(_CHUNK, max(1, _MAX_SIMILARITIES // len(train)))
    for votes_of, part in zip(scores.split(chunk), test_features.split(chunk), strict=True):
        similar, neighbours = (normalize(part.float()) @ train.T).topk(k, dim=1)
        votes = ((similar - similar[:, :1]) / temperature).exp()
        votes_of.scatter_add_(1, train_labels[neighbours], votes)
    return scores
