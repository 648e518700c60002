import numpy as np
import pytest
import torch

from pipeline.base.errors import UserError
from pipeline.model import ViTConfig, create, load, to_npz
from pipeline.model.convert.official import from_npz, read_npz

ATTENTION = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1"
MLP = "Transformer/encoderblock_1/MlpBlock_3"
POSITIONS = "Transformer/posembed_input/pos_embedding"


def logits(model, images):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(images).float().permute(0, 3, 1, 2)).double().numpy()


@pytest.mark.parametrize("layout", ["released", "linen"])
@pytest.mark.parametrize("representation", [True, False])
def test_logits_are_those_of_the_equations_on_the_file(npz, random_arrays, equations, images, layout, representation):
    model = load(npz(layout, representation))
    expected = equations(random_arrays(layout, representation), images, layout=layout)
    np.testing.assert_allclose(logits(model, images), expected, atol=2e-5)


# For each kind of tensor, a wrong order of axes that keeps its shape.
SLIPS = {
    "embedding/kernel": lambda a: a.transpose(1, 0, 2, 3),  # height for width
    POSITIONS: lambda a: np.concatenate([a[:, :1], a[:, 1:].reshape(4, 4, -1).swapaxes(0, 1).reshape(1, 16, -1)], 1),
    f"{ATTENTION}/query/kernel": lambda a: a.transpose(0, 2, 1),  # heads for their width
    f"{ATTENTION}/key/kernel": lambda a: a.transpose(0, 2, 1),
    f"{ATTENTION}/value/kernel": lambda a: a.reshape(16, 16).T.reshape(a.shape),  # inputs for outputs
    f"{ATTENTION}/query/bias": lambda a: a.T,
    f"{ATTENTION}/value/bias": lambda a: a.T,
    f"{ATTENTION}/out/kernel": lambda a: a.transpose(1, 0, 2),
    f"{MLP}/Dense_0/kernel": lambda a: a.T,
    f"{MLP}/Dense_1/kernel": lambda a: a.T,
    "pre_logits/kernel": lambda a: a.T,
    "head/kernel": lambda a: a.T,
}


@pytest.mark.parametrize("key", SLIPS)
def test_transposed_tensors_change_the_logits(npz, random_arrays, equations, images, key):
    """Wrong axes of any tensor change the logits by far more than the tolerance of the test above."""
    slipped = SLIPS[key](random_arrays()[key])
    difference = logits(load(npz(**{key: slipped})), images) - equations(random_arrays(), images)
    assert np.abs(difference).max() > 1e-2


def test_swapped_projections_change_the_logits(npz, random_arrays, equations, images):
    arrays = random_arrays()
    query, key = f"{ATTENTION}/query/kernel", f"{ATTENTION}/key/kernel"
    swapped = npz(**{query: arrays[key], key: arrays[query]})
    assert np.abs(logits(load(swapped), images) - equations(arrays, images)).max() > 1e-2


@pytest.mark.parametrize("layout", ["released", "linen"])
@pytest.mark.parametrize("representation", [True, False])
def test_in_and_out_again_is_exact(npz, random_arrays, layout, representation):
    arrays = random_arrays(layout, representation)
    written = to_npz(load(npz(layout, representation)), layout)
    assert written.keys() == arrays.keys()
    assert all(np.array_equal(written[key], arrays[key]) and written[key].dtype == np.float32 for key in arrays)


def test_out_and_in_again_is_exact():
    model = create("ViT-mu/4", 12, 7, representation=True, width=24, depth=3, mlp_width=40, num_heads=3)
    found = from_npz(to_npz(model))
    assert (found.config, found.extra, found.notes) == (model.config, {}, [])
    assert found.state.keys() == model.state_dict().keys()
    assert all(torch.equal(found.state[name], tensor) for name, tensor in model.state_dict().items())


def test_configuration_from_the_tensors(npz):
    assert read_npz(npz()).config == ViTConfig(16, 2, 16, 4, 4, (16, 16), 16, representation=True, gelu="tanh")
    headless = npz(representation=False, **{"head/kernel": None, "head/bias": None})
    assert read_npz(headless).config == ViTConfig(16, 2, 16, 4, 4, (16, 16), 0, representation=False, gelu="tanh")


def a(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cls": None}, '"cls" (1, 1, 16) is missing'),
        ({"embedding/kernel": None}, '"embedding/kernel" (P, P, 3, D) is missing'),
        ({"head/bias": None}, '"head/bias" (16,) is missing'),
        ({"pre_logits/kernel": None}, '"pre_logits/kernel" (16, 16) is missing'),
        ({f"{ATTENTION}/key/bias": None}, f'"{ATTENTION}/key/bias" (4, 4) is missing'),
        ({"embedding/kernel": a(4, 4, 16)}, '"embedding/kernel" should be (P, P, 3, D), but is (4, 4, 16)'),
        ({"embedding/kernel": a(4, 5, 3, 16)}, '"embedding/kernel" should be (4, 4, 3, 16), but is (4, 5, 3, 16)'),
        ({f"{ATTENTION}/out/kernel": a(16, 16)}, '/out/kernel" should be (4, 4, 16), but is (16, 16)'),
        ({f"{MLP}/Dense_1/kernel": a(16, 17)}, "should be (16, 16), but is (16, 17)"),
        ({POSITIONS: a(1, 16, 16)}, "has 16 rows, which is not a class token and a square grid"),
        ({POSITIONS: a(1, 0, 16)}, "has 0 rows"),
        ({"Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel": a(16, 3, 5)}, "is (16, 3, 5)"),
        ({"head/kernel": a(16, 16) * np.nan}, '"head/kernel" (16, 16) holds 256 NaN or Inf'),
        ({"head/bias": np.ones(16, np.int64)}, '"head/bias" should hold floats, but holds int64'),
        ({"extra/kernel": a(3)}, '"extra/kernel" (3,) is not part of this model (1 such)'),
        ({"Transformer/encoderblock_3/LayerNorm_0/scale": a(16)}, 'encoderblock_2/LayerNorm_0/scale" (16,) is missing'),
        ({"conv_root/kernel": a(7, 7, 3, 64)}, '"gn_root/scale" (64,) is missing'),
    ],
)
def test_a_bad_file_names_the_key_and_the_shapes(npz, changes, message):
    path = npz(**changes)
    with pytest.raises(UserError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_another_kind_is_refused(npz, tmp_path):
    whole = npz().read_bytes()
    bad = {
        "truncated.npz": whole[: len(whole) // 2],
        "flipped.npz": whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
        "empty.npz": b"",
        "text.npz": b"<html>404</html>",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: not a readable .npz"):
            load(tmp_path / name)
    with open(tmp_path / "array.npz", "wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(UserError, match="holds one array"):
        load(tmp_path / "array.npz")
    with pytest.raises(UserError, match="no such file"):
        read_npz(tmp_path / "absent.npz")


def test_pickles_are_not_executed(npz, tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "sprung"), "w")

    path = npz(cls=np.array([Trap()], dtype=object))
    with pytest.raises(UserError, match="Python objects"):
        load(path)
    assert not (tmp_path / "sprung").exists()
