"""Weighted nearest neighbours of features (Wu et al. 2018, arXiv 1805.01978), as in dino/eval_knn.py.

Shapes: n training samples, m test samples, D features, K classes, k neighbours.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize


@torch.no_grad()
def knn_predict(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    num_classes: int,
    k: int,
    temperature: float,
    chunks: tuple[int, int] = (1024, 16_384),
) -> Tensor:
    """Votes for each class, float32 (m, K): each of the k most similar training samples votes with exp(cosine /
    temperature).

    DINO has k = 20 (arXiv 2104.14294, section 4.1) and a temperature of 0.07 (dino/eval_knn.py).
    train_features: float (n, D); train_labels: int64 (n,), 0 to K - 1; test_features: float (m, D); all on one device.
    Features are normalised here. With fewer than k training samples all of them vote. The votes of a row are divided by
    its largest single vote, which keeps their order and prevents an overflow at low temperatures.
    chunks: test and training samples compared at a time; by default their similarities take 64 MiB.
    """
    k = min(k, len(train_features))
    train = normalize(train_features.float())
    scores = torch.zeros(len(test_features), num_classes, device=test_features.device)
    for first in range(0, len(test_features), chunks[0]):
        test = normalize(test_features[first : first + chunks[0]].float())
        similar, neighbours = _most_similar(train, test, k, chunks[1])
        votes = ((similar - similar.amax(1, keepdim=True)) / temperature).exp()
        scores[first : first + chunks[0]].scatter_add_(1, train_labels[neighbours], votes)
    return scores


def _most_similar(train: Tensor, test: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """(cosines, rows of train), (m, k) each, of the k largest cosines per test sample; `train` is processed in
    chunks.
    """
    similar = torch.empty(len(test), 0, device=test.device)
    rows = torch.empty(len(test), 0, dtype=torch.int64, device=test.device)
    for first in range(0, len(train), chunk):
        cosines = test @ train[first : first + chunk].T
        theirs = torch.arange(first, first + cosines.shape[1], device=test.device).expand_as(cosines)
        # Merge the k best so far with this chunk.
        similar, places = torch.cat([similar, cosines], 1).topk(min(k, similar.shape[1] + cosines.shape[1]), dim=1)
        rows = torch.cat([rows, theirs], 1).gather(1, places)
    return similar, rows
