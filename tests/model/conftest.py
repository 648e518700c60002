"""Reference code that shares nothing with the package: random official weights, the paper's equations in numpy,
transformers.
"""

from math import erf

import numpy as np
import pytest

# D = M = K = 16, H = D/H = 4, P = 4 and a 4 x 4 grid: every kernel is square, so that no shape check finds a
# transposition.
WIDTH, DEPTH, HEADS, PATCH, GRID, CLASSES = 16, 2, 4, 4, 4, 16
SIDE = PATCH * GRID
MODULES = {
    "released": ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    "linen": ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),
}


def random_arrays(layout="released", representation=True, seed=0):
    """Every tensor of a tiny official checkpoint, none of them zero or constant."""
    rng = np.random.default_rng(seed)
    head_dim = WIDTH // HEADS
    shapes = {
        "cls": (1, 1, WIDTH),
        "embedding/kernel": (PATCH, PATCH, 3, WIDTH),
        "embedding/bias": (WIDTH,),
        "Transformer/posembed_input/pos_embedding": (1, 1 + GRID * GRID, WIDTH),
        "Transformer/encoder_norm/scale": (WIDTH,),
        "Transformer/encoder_norm/bias": (WIDTH,),
        "head/kernel": (WIDTH, CLASSES),
        "head/bias": (CLASSES,),
    }
    if representation:
        shapes |= {"pre_logits/kernel": (WIDTH, WIDTH), "pre_logits/bias": (WIDTH,)}
    norm_1, attention, norm_2, mlp = MODULES[layout]
    for i in range(DEPTH):
        block = f"Transformer/encoderblock_{i}"
        for norm in (norm_1, norm_2):
            shapes |= {f"{block}/{norm}/scale": (WIDTH,), f"{block}/{norm}/bias": (WIDTH,)}
        for part in ("query", "key", "value"):
            shapes[f"{block}/{attention}/{part}/kernel"] = (WIDTH, HEADS, head_dim)
            shapes[f"{block}/{attention}/{part}/bias"] = (HEADS, head_dim)
        shapes |= {
            f"{block}/{attention}/out/kernel": (HEADS, head_dim, WIDTH),
            f"{block}/{attention}/out/bias": (WIDTH,),
        }
        for dense in ("Dense_0", "Dense_1"):
            shapes |= {f"{block}/{mlp}/{dense}/kernel": (WIDTH, WIDTH), f"{block}/{mlp}/{dense}/bias": (WIDTH,)}
    arrays = {key: rng.normal(0, 0.5, shape) for key, shape in shapes.items()}
    return {key: (a + 1 if key.endswith("scale") else a).astype(np.float32) for key, a in arrays.items()}


def equations(arrays, images, gelu="tanh", layout="released"):
    """ViT paper, Eq. 1-4 and Appendix A, in float64, on official tensors. images: (B, H, W, 3) -> logits (B, K).

    Without a class token the head reads the mean of all tokens, or with MAPHead_0 attention pooling (big_vision).
    """
    w = {key: a.astype(np.float64) for key, a in arrays.items()}
    norm_1, attention, norm_2, mlp = MODULES[layout]

    def norm(x, key):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * w[f"{key}/scale"] + w[f"{key}/bias"]

    def act(x):
        if gelu == "tanh":
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))

    def dense(x, key):
        return x @ w[f"{key}/kernel"] + w[f"{key}/bias"]

    def attend(x, y, key):
        """Queries of x (B, N, D) to y (B, M, D) -> (B, N, D)."""
        q, k, v = (
            np.einsum("bnd,dhe->bhne", z, w[f"{key}/{part}/kernel"]) + w[f"{key}/{part}/bias"][:, None]
            for z, part in ((x, "query"), (y, "key"), (y, "value"))
        )
        scores = np.einsum("bhne,bhme->bhnm", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("bhnm,bhme->bhne", weights, v)
        return np.einsum("bhne,hed->bnd", mixed, w[f"{key}/out/kernel"]) + w[f"{key}/out/bias"]

    def two_layers(x, key):
        return dense(act(dense(x, f"{key}/Dense_0")), f"{key}/Dense_1")

    patch = w["embedding/kernel"].shape[0]
    rows, columns = images.shape[1] // patch, images.shape[2] // patch
    patches = [
        images[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch] for r in range(rows) for c in range(columns)
    ]
    x = np.stack([np.einsum("bhwc,hwcd->bd", p, w["embedding/kernel"]) + w["embedding/bias"] for p in patches], axis=1)
    class_token = [np.repeat(w["cls"], len(x), axis=0)] if "cls" in w else []
    z = np.concatenate([*class_token, x], axis=1) + w["Transformer/posembed_input/pos_embedding"]
    for i in range(sum(key.endswith(f"{attention}/out/bias") and "encoderblock" in key for key in w)):
        block = f"Transformer/encoderblock_{i}"
        y = norm(z, f"{block}/{norm_1}")
        z = z + attend(y, y, f"{block}/{attention}")
        z = z + two_layers(norm(z, f"{block}/{norm_2}"), f"{block}/{mlp}")
    z = norm(z, "Transformer/encoder_norm")
    if "MAPHead_0/probe" in w:
        read = attend(np.repeat(w["MAPHead_0/probe"], len(z), axis=0), z, "MAPHead_0/MultiHeadDotProductAttention_0")[
            :, 0
        ]
        y = read + two_layers(norm(read, "MAPHead_0/LayerNorm_0"), "MAPHead_0/MlpBlock_0")
    else:
        y = z[:, 0] if class_token else z.mean(1)
    if "pre_logits/kernel" in w:
        y = np.tanh(dense(y, "pre_logits"))
    return dense(y, "head")


@pytest.fixture(name="random_arrays", scope="session")
def random_arrays_fixture():
    return random_arrays


@pytest.fixture(name="equations", scope="session")
def equations_fixture():
    return equations


@pytest.fixture(scope="session")
def transformers():
    import transformers  # here, because it takes seconds

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="session")
def images():
    """(B, H, W, 3) float64 in [-1, 1], as the equations read them; the model reads channels first."""
    return np.random.default_rng(7).uniform(-1, 1, (3, SIDE, SIDE, 3))


@pytest.fixture
def npz(tmp_path):
    """A function that writes random official weights with some keys changed, or left out (None), and returns the
    path.
    """

    def write(layout="released", representation=True, **changes):
        arrays = random_arrays(layout, representation) | changes
        path = tmp_path / "weights.npz"
        np.savez(path, **{key: a for key, a in arrays.items() if a is not None})
        return path

    return write
