"""The .npz of big_vision, hybrids and BiT, against formulae computed on the file's arrays."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_parts import logits, same

from pipeline.model import load, read_weights

D, GRID, HEADS = 16, 4, 4
TABLE = "Transformer/posembed_input/pos_embedding"
MAP = "MAPHead_0/MultiHeadDotProductAttention_0"


def write(folder, arrays):
    np.savez(folder / "weights.npz", **arrays)
    return folder / "weights.npz"


# ---------------------------------------------------------------------- big_vision


def big_vision(random_arrays, pool):
    """A file's arrays, without prefix; only patches have positions."""
    rng = np.random.default_rng(5)
    arrays = random_arrays("linen")
    arrays["pos_embedding"] = arrays.pop(TABLE)[:, 1:]
    if pool != "token":
        del arrays["cls"]
    if pool == "map":
        arrays["MAPHead_0/probe"] = rng.normal(0, 0.5, (1, 1, D))
        for part in ("query", "key", "value"):
            arrays[f"{MAP}/{part}/kernel"] = rng.normal(0, 0.5, (D, HEADS, D // HEADS))
            arrays[f"{MAP}/{part}/bias"] = rng.normal(0, 0.5, (HEADS, D // HEADS))
        arrays[f"{MAP}/out/kernel"] = rng.normal(0, 0.5, (HEADS, D // HEADS, D))
        for dense in ("MlpBlock_0/Dense_0", "MlpBlock_0/Dense_1"):
            arrays[f"MAPHead_0/{dense}/kernel"] = rng.normal(0, 0.5, (D, D))
        for bias in ("MultiHeadDotProductAttention_0/out", "LayerNorm_0", "MlpBlock_0/Dense_0", "MlpBlock_0/Dense_1"):
            arrays[f"MAPHead_0/{bias}/bias"] = rng.normal(0, 0.5, D)
        arrays["MAPHead_0/LayerNorm_0/scale"] = rng.normal(1, 0.5, D)
    return {key: array.astype(np.float32) for key, array in arrays.items()}


def as_equations_take_it(arrays):
    """Positions under vision_transformer's key, with zeros for the class token."""
    arrays = dict(arrays)
    table = arrays.pop("pos_embedding")
    arrays[TABLE] = np.concatenate([np.zeros((1, int("cls" in arrays), D)), table], axis=1)
    return arrays


def stacked(arrays):
    """Blocks stacked in one array, as with scan=True in big_vision."""
    first, kept = "Transformer/encoderblock_0/", {k: a for k, a in arrays.items() if "encoderblock" not in k}
    for key in [key for key in arrays if key.startswith(first)]:
        kept[key.replace("_0/", "/", 1)] = np.stack([arrays[key], arrays[key.replace("_0/", "_1/", 1)]])
    return kept


@pytest.mark.parametrize("pool", ["token", "gap", "map"])
@pytest.mark.parametrize("prefix", ["", "params/", "params/img/", "opt/target/"])
def test_big_visions_logits_are_those_of_the_equations(tmp_path, random_arrays, equations, images, pool, prefix):
    arrays = big_vision(random_arrays, pool)
    expected = equations(as_equations_take_it(arrays), images, layout="linen")
    in_file = stacked(arrays) if prefix == "params/img/" else arrays
    model = load(write(tmp_path, {prefix + key: array for key, array in in_file.items()}))
    assert model.config.pool == pool
    np.testing.assert_allclose(logits(model, images), expected, atol=2e-5)


def test_assumptions_about_big_vision_files_are_reported(tmp_path, random_arrays):
    arrays = {f"params/img/{key}": array for key, array in big_vision(random_arrays, "token").items()}
    said = []
    read_weights(write(tmp_path, arrays | {"params/t": np.ones(1, np.float32)}), said.append)
    assert said == [
        "1 array outside of params/img/ left out: not part of this model",
        "the class token has no position in the file: zeros",
    ]
    del arrays["params/img/pos_embedding"]
    config = read_weights(write(tmp_path, arrays), said.append).config
    assert (config.positions, config.image_size) == ("sincos2d", (224, 224))
    assert "sine-cosine" in said[-1]


def test_bfloat16_is_read(tmp_path, random_arrays):
    arrays = big_vision(random_arrays, "gap")
    halves = {key: torch.from_numpy(array).bfloat16() for key, array in arrays.items()}
    path = write(tmp_path, {key: half.view(torch.int16).numpy().view("V2") for key, half in halves.items()})
    rounded = write(tmp_path.parent, {key: half.float().numpy() for key, half in halves.items()})
    assert same(load(path), load(rounded))


# ---------------------------------------------------------------------- ResNets


def rand(rng, *shape):
    return rng.normal(0, 0.5, shape).astype(np.float32)


def bit_arrays():
    """A BiT of stages of 2 and 1 units, width 32, in the authors' keys; 1 x 1 kernels are square where possible."""
    rng, arrays = np.random.default_rng(0), {}

    def conv(key, *shape):
        arrays[f"{key}/standardized_conv2d/kernel"] = rand(rng, *shape)

    def norm(key, width):
        arrays[f"{key}/group_norm/gamma"], arrays[f"{key}/group_norm/beta"] = 1 + rand(rng, width), rand(rng, width)

    conv("resnet/root_block", 7, 7, 3, 32)
    for unit, inputs, mid in (("block1/unit01", 32, 32), ("block1/unit02", 128, 32), ("block2/unit01", 128, 64)):
        key = f"resnet/{unit}"
        sizes = (("a", inputs, mid, 1), ("b", mid, mid, 3), ("c", mid, 4 * mid, 1))
        for part, read, written, side in sizes:
            norm(f"{key}/{part}", read)
            conv(f"{key}/{part}", side, side, read, written)
        if unit != "block1/unit02":
            conv(f"{key}/a/proj", 1, 1, inputs, 4 * mid)
    norm("resnet", 256)
    arrays["resnet/head/conv2d/kernel"], arrays["resnet/head/conv2d/bias"] = rand(rng, 1, 1, 256, 256), rand(rng, 256)
    return arrays


def bit_logits(arrays, images):
    """bit_pytorch/models.py in float64, on the file's arrays. images: (B, H, W, 3)."""
    w = {key: torch.from_numpy(array).double() for key, array in arrays.items()}

    def conv(x, key, stride=1):
        kernel = w[f"{key}/standardized_conv2d/kernel"].permute(3, 2, 0, 1)
        variance, mean = torch.var_mean(kernel, dim=(1, 2, 3), keepdim=True, correction=0)
        return F.conv2d(x, (kernel - mean) / torch.sqrt(variance + 1e-10), None, stride, kernel.shape[2] // 2)

    def act(x, key):
        return F.relu(F.group_norm(x, 32, w[f"{key}/group_norm/gamma"], w[f"{key}/group_norm/beta"], 1e-5))

    x = F.max_pool2d(
        F.pad(conv(torch.from_numpy(images).permute(0, 3, 1, 2), "resnet/root_block", 2), (1, 1, 1, 1)), 3, 2
    )
    for unit, stride in (("block1/unit01", 1), ("block1/unit02", 1), ("block2/unit01", 2)):
        key = f"resnet/{unit}"
        y = act(x, f"{key}/a")
        shortcut = conv(y, f"{key}/a/proj", stride) if f"{key}/a/proj/standardized_conv2d/kernel" in w else x
        y = conv(y, f"{key}/a")
        y = conv(act(y, f"{key}/b"), f"{key}/b", stride)
        x = conv(act(y, f"{key}/c"), f"{key}/c") + shortcut
    features = act(x, "resnet").mean((2, 3))
    return (features @ w["resnet/head/conv2d/kernel"][0, 0] + w["resnet/head/conv2d/bias"]).numpy()


def hybrid_arrays():
    """A hybrid of one unit, then a ViT of one block on its 4 x 4 cells, in the released keys."""
    rng, arrays, C = np.random.default_rng(0), {}, 256

    def norm(key, width, *ones):
        arrays[f"{key}/scale"], arrays[f"{key}/bias"] = 1 + rand(rng, *ones, width), rand(rng, *ones, width)

    arrays["conv_root/kernel"] = rand(rng, 7, 7, 3, 64)
    norm("gn_root", 64, 1, 1, 1)  # older files have axes for batch and image, too
    for i, (side, read, written) in enumerate(((1, 64, 64), (3, 64, 64), (1, 64, C)), start=1):
        arrays[f"block1/unit1/conv{i}/kernel"] = rand(rng, side, side, read, written)
        norm(f"block1/unit1/gn{i}", written)
    arrays["block1/unit1/conv_proj/kernel"] = rand(rng, 1, 1, 64, C)
    norm("block1/unit1/gn_proj", C)
    arrays |= {"embedding/kernel": 0.1 * rand(rng, 1, 1, C, D), "cls": rand(rng, 1, 1, D), TABLE: rand(rng, 1, 17, D)}
    return arrays


def stem_cells(arrays, images):
    """vit_jax/models_resnet.py in float64: (B, H, W, 3) -> (B, h, w, C), which the patch embedding reads."""
    w = {key: torch.from_numpy(array).double() for key, array in arrays.items()}

    def conv(x, key, stride=1):
        kernel = w[f"{key}/kernel"].permute(3, 2, 0, 1)
        kernel = (kernel - kernel.mean((1, 2, 3), keepdim=True)) / (
            kernel.std((1, 2, 3), keepdim=True, correction=0) + 1e-5
        )
        side = kernel.shape[2]
        before = (side - stride) // 2  # padding "SAME" if the stride divides the side
        return F.conv2d(F.pad(x, (before, side - stride - before) * 2 if side > 1 else (0, 0)), kernel, None, stride)

    def norm(x, key):
        return F.group_norm(x, 32, w[f"{key}/scale"].flatten(), w[f"{key}/bias"].flatten(), 1e-6)

    x = F.relu(norm(conv(torch.from_numpy(images).permute(0, 3, 1, 2), "conv_root", 2), "gn_root"))
    x = F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)
    unit = "block1/unit1"
    y = F.relu(norm(conv(x, f"{unit}/conv1"), f"{unit}/gn1"))
    y = F.relu(norm(conv(y, f"{unit}/conv2"), f"{unit}/gn2"))
    y = norm(conv(y, f"{unit}/conv3"), f"{unit}/gn3")
    return F.relu(y + norm(conv(x, f"{unit}/conv_proj"), f"{unit}/gn_proj")).permute(0, 2, 3, 1).numpy()


def test_bits_file_computes_the_logits_of_its_authors_code(tmp_path, images):
    arrays = bit_arrays()
    expected = bit_logits(arrays, images)
    model = load(write(tmp_path, arrays), image_size=16)
    np.testing.assert_allclose(logits(model, images), expected, atol=1e-3)
    numbered = {key.replace("standardized_conv2d/", "standardized_conv2d_17/"): a for key, a in arrays.items()}
    assert same(load(write(tmp_path, numbered), image_size=16), model)


def test_a_hybrids_file_computes_the_logits_of_its_authors_code(tmp_path, random_arrays, equations, images):
    """The authors' formulae for the stem, then the paper's equations on its cells, as patches of 1 x 1."""
    plain = {k: a for k, a in random_arrays().items() if k != "embedding/kernel"}
    arrays = plain | hybrid_arrays()
    expected = equations(arrays, stem_cells(arrays, images))
    model = load(write(tmp_path, arrays))
    assert (model.config.stem, model.config.image_size) == ((1,), (16, 16))
    np.testing.assert_allclose(logits(model, images), expected, atol=1e-4)
