"""kNN votes equal scikit-learn's, for any chunk size."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from pipeline.evaluate.probes import knn


def features(n: int, seed: int, num_classes: int = 5, d: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (n,), generator=generator)
    centres = torch.randn(num_classes, d, generator=torch.Generator().manual_seed(9))
    # Different lengths, because only directions may count.
    lengths = torch.rand(n, 1, generator=generator) * 50 + 0.01
    return (centres[labels] + 1.5 * torch.randn(n, d, generator=generator)) * lengths, labels


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (20, 1.0), (7, 0.005), (500, 0.07)])
def test_votes_equal_scikit_learns(k: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels = features(300, 1)
    test, _ = features(90, 2)

    def weights(distances: np.ndarray) -> np.ndarray:
        return np.exp((1 - distances) / temperature - (1 - distances.min(1, keepdims=True)) / temperature)

    neighbours = KNeighborsClassifier(min(k, 300), metric="cosine", weights=weights, algorithm="brute")
    expected = neighbours.fit(train.double().numpy(), labels.numpy()).predict_proba(test.double().numpy())
    whole = knn.knn_predict(train, labels, test, 6, k, temperature)
    assert whole.shape == (90, 6)
    assert not whole[:, 5].any()  # No training sample is of this class.
    shares = (whole / whole.sum(1, keepdim=True)).numpy()
    np.testing.assert_allclose(shares[:, :5], expected, atol=2e-4)
    assert len(np.unique(shares.argmax(1))) == 5

    monkeypatch.setattr(knn, "_MAX_SIMILARITIES", 7 * 300)
    parts = knn.knn_predict(train, labels, test, 6, k, temperature)
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-5)
