import numpy as np
import pytest
from model_parts import logits

from pipeline.base.errors import UserError
from pipeline.model import ViTConfig, load
from pipeline.model.convert.official import read_npz

POSITIONS = "Transformer/posembed_input/pos_embedding"


@pytest.mark.parametrize("layout", ["released", "linen"])
@pytest.mark.parametrize("representation", [True, False])
def test_logits_are_those_of_the_equations_on_the_file(npz, random_arrays, equations, images, layout, representation):
    model = load(npz(layout, representation))
    expected = equations(random_arrays(layout, representation), images, layout=layout)
    np.testing.assert_allclose(logits(model, images), expected, atol=2e-5)


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
        ({"embedding/kernel": a(4, 5, 3, 16)}, '"embedding/kernel" should be (4, 4, 3, 16), but is (4, 5, 3, 16)'),
        ({POSITIONS: a(1, 16, 16)}, "has 16 rows, which is not a class token and a square grid"),
        ({"head/bias": np.ones(16, np.int64)}, '"head/bias" should hold floats, but holds int64'),
        ({"extra/kernel": a(3)}, '"extra/kernel" (3,) is not part of this model (1 such)'),
    ],
)
def test_a_bad_file_names_the_key_and_the_shapes(npz, changes, message):
    path = npz(**changes)
    with pytest.raises(UserError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_pickles_are_not_executed(npz, tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "sprung"), "w")

    path = npz(cls=np.array([Trap()], dtype=object))
    with pytest.raises(UserError, match="Python objects"):
        load(path)
    assert not (tmp_path / "sprung").exists()
