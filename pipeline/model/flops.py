"""What a ViT costs: parameters and arithmetic, from its configuration alone.

Letters as in vit.py: N tokens, D width, L depth, M MLP width, P patch side, C = 3 channels, K classes.
"""

from pipeline.model.variants import ViTConfig


def num_parameters(config: ViTConfig) -> int:
    """The exact number of parameters, head and representation layer included (ViT paper, Table 1, rounded)."""
    N, D, L, M, P, K = _letters(config)
    embedding = (3 * P**2 * D + D) + D + N * D  # patches, class token, positions
    block = 4 * (D**2 + D) + (D * M + M) + (M * D + D) + 2 * (2 * D)  # q, k, v, out; MLP; two LayerNorms
    representation = D**2 + D if config.representation else 0
    head = D * K + K if K else 0
    return embedding + L * block + 2 * D + representation + head


def forward_macs(config: ViTConfig) -> int:
    """Multiply-adds of one image's forward pass.

    Not counted: LayerNorm, softmax, GELU, biases, representation layer and head.
    """
    N, D, L, M, P, _ = _letters(config)
    embedding = (N - 1) * 3 * P**2 * D
    dense = N * (4 * D**2 + 2 * D * M)  # q, k, v, out; MLP
    attention = 2 * N**2 * D  # q k^T, and its softmax times v
    return embedding + L * (dense + attention)


def training_flops_per_image(config: ViTConfig) -> int:
    """FLOPs of one image in training: 2 a multiply-add, and the backward pass costs twice the forward.

    This is how the ViT paper counts (Table 6: L/16, 7 epochs of 303 M images, 783 exaFLOPs). Recomputation of
    activations does not add to it, so that MFU = this * images/s / peak.
    """
    return 3 * 2 * forward_macs(config)


def _letters(config: ViTConfig) -> tuple[int, int, int, int, int, int]:
    return config.num_tokens, config.width, config.depth, config.mlp_width, config.patch_size, config.num_classes
