import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.base.errors import UserError
from pipeline.model import (
    configure,
    create,
    load,
    read_weights,
    resample_positions,
    safetensors_metadata,
    save,
)


def tiny(**changes):
    settings = {"image_size": 8, "num_classes": 5, "representation": True, "dropout": 0.1, "gelu": "erf", "seed": 3}
    model = create("ViT-mu/4", **settings | {"head_bias": -10.0} | changes)
    with torch.no_grad():
        if model.config.num_classes:
            model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model


def same_values(model, other, *, but=()):
    a, b = model.state_dict(), other.state_dict()
    return all(torch.equal(a[name], b[name]) for name in b if not name.startswith(tuple(but)))


@pytest.fixture
def file(tmp_path):
    save(tiny(), tmp_path / "model.safetensors", {"classes": list("abcde"), "preprocessing": {"image_size": 8}})
    return tmp_path / "model.safetensors"


def test_saved_weights_come_back(file):
    model = load(file)
    assert model.config == tiny().config
    assert same_values(model, tiny())
    config, state, extra = read_weights(file)[:3]
    assert config == tiny().config
    assert extra == {"classes": list("abcde"), "preprocessing": {"image_size": 8}}
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert [path.name for path in file.parent.iterdir()] == ["model.safetensors"]


def test_a_loaded_model_is_ready_for_images(tmp_path):
    """In evaluation mode, with the names of its classes, readable ones where there are some."""
    about = {"preprocessing": {"eval_crop": "resize"}, "class_names": ["a cat", "a dog"], "loss": "sigmoid", "step": 7}
    save(tiny(num_classes=2), tmp_path / "a.safetensors", {"classes": ["n1", "n2"], **about})
    model, images = load(tmp_path / "a.safetensors"), torch.zeros(2, 3, 8, 8)
    assert torch.equal(model(images), model(images))
    assert model.classes == ["a cat", "a dog"]
    assert load(tmp_path / "a.safetensors", num_classes=0).classes is None
    other = load(tmp_path / "a.safetensors", num_classes=2, new_head=True)
    assert (other.classes, other.extra) == (None, {"preprocessing": {"eval_crop": "resize"}})
    assert create("ViT-mu/4", 8, 2).classes is None

    # What is saved again says the same of images and classes, and no longer which step of a run it is.
    save(model, tmp_path / "b.safetensors")
    expected = {"classes": ["n1", "n2"], **about}
    del expected["step"]
    assert read_weights(tmp_path / "b.safetensors").extra == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_a_flat_buffer_are_saved_as_small_fp32_tensors(tmp_path, dtype):
    model = tiny()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).to(dtype)
    flat = torch.cat([flat, flat.new_zeros(100_000)])  # as if other parameters were in the buffer
    sizes = [parameter.numel() for parameter in model.parameters()]
    pieces = zip(model.named_parameters(), flat.split([*sizes, 100_000]), strict=False)
    save(model, tmp_path / "b.pt")
    expected = model.positions.to(dtype).float()
    for (_, parameter), piece in pieces:
        parameter.data = piece.view(parameter.shape)
    save(model, tmp_path / "a.pt")
    assert abs((tmp_path / "a.pt").stat().st_size - (tmp_path / "b.pt").stat().st_size) < 1000
    assert torch.equal(load(tmp_path / "a.pt").positions, expected)


def test_weights_are_found_in_checkpoint_and_run_folders(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-000020"
    checkpoint.mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("step-000020\n")
    save(tiny(), checkpoint / "model.safetensors")
    assert same_values(load(checkpoint), tiny())
    assert same_values(load(str(tmp_path)), tiny())

    (tmp_path / "checkpoints" / "latest").write_text("step-000030\n")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/status.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "checkpoints", tmp_path / "new"):
        with pytest.raises(UserError, match=r"model\.safetensors.*checkpoint"):
            load(folder)
    with pytest.raises(UserError, match="no such file or folder"):
        load(tmp_path / "absent")


def test_weights_of_a_run_are_found_where_its_settings_put_its_checkpoints(tmp_path):
    """A run that had moved its checkpoints was refused, or read as of the time before."""
    run, disk = tmp_path / "runs/a", tmp_path / "disk"
    for folder, seed in ((run / "checkpoints", 4), (disk / "a", 5)):
        (folder / "step-00000020").mkdir(parents=True)
        save(tiny(seed=seed), folder / "step-00000020/model.safetensors")
        (folder / "latest").write_text("step-00000020")

    def keep_in(folder: str) -> None:
        (run / "run.json").write_text(json.dumps({"facts": {"name": "a", "checkpoint_folder": folder}}))

    keep_in("")
    assert same_values(load(run), tiny(seed=4))
    keep_in(str(disk))
    assert same_values(load(run), tiny(seed=5))
    keep_in("s3://bucket/all/?region=x")
    with pytest.raises(
        UserError,
        match=r"runs/a: its checkpoints are in s3://bucket/all/a\?region=x \(checkpoint.folder\), and weights",
    ):
        load(run)


def test_the_same_weights_are_the_same_bytes(tmp_path):
    """safetensors writes the entries of the metadata in an order of its own each time."""
    files = [tmp_path / f"{number}.safetensors" for number in range(12)]
    for path in files:
        save(tiny(), path.with_stem("model"), {"run": "ü", "classes": list("abcde")})
        path.with_stem("model").rename(path)
    assert len({path.read_bytes() for path in files}) == 1
    assert same_values(load(files[0]), tiny())
    assert read_weights(files[0])[2] == {"run": "ü", "classes": list("abcde")}


def test_another_number_of_classes_means_fine_tuning(file):
    """ViT paper, B.1.1: one zero-initialised linear head replaces the representation layer and the head."""
    for model in (load(file, num_classes=3), load(file, num_classes=5, new_head=True), load(file, new_head=True)):
        assert model.representation is None
        assert not model.config.representation
        assert not model.head.weight.any()
        assert not model.head.bias.any()
        assert same_values(tiny(), model, but=("head.",))
    assert load(file, num_classes=3).head.weight.shape == (3, 32)
    assert same_values(load(file, num_classes=5), tiny())


@torch.no_grad()
def test_the_mean_of_the_patches_under_a_norm_of_its_own(file, tmp_path):
    """As facebookresearch/mae fine-tunes (global_pool): blocks, mean of the patches, a new LayerNorm, the new head."""
    model, images, found = load(file, num_classes=3, mean_pool=True).eval(), torch.rand(2, 3, 8, 8), []
    assert same_values(tiny(), model, but=("head.", "norm."))
    assert (model.norm.weight == 1).all()
    assert not model.norm.bias.any()
    model.blocks[-1].register_forward_hook(lambda block, inputs, output: found.append(output))
    features = model.features(images)
    expected = torch.nn.functional.layer_norm(found[0][:, 1:].mean(1), (32,), eps=1e-6)
    torch.testing.assert_close(features, expected)
    save(model, tmp_path / "finetuned.pt")
    assert torch.equal(load(tmp_path / "finetuned.pt").eval().features(images), features)
    with pytest.raises(UserError, match="mean_pool needs a new head"):
        load(file, mean_pool=True)


@torch.no_grad()
@pytest.mark.parametrize(("pool", "pooled"), [("token", "attentive"), ("gap", "map")])
def test_a_new_attention_pool_reads_all_tokens(tmp_path, pool, pooled):
    save(tiny(pool=pool), tmp_path / "old.pt")
    model, images, found = (
        load(tmp_path / "old.pt", num_classes=3, attentive_pool=True).eval(),
        torch.rand(2, 3, 8, 8),
        [],
    )
    assert model.config.pool == pooled
    assert same_values(tiny(pool=pool), model, but=("head.", "pool."))
    assert model.pool.query.weight.any()
    model.norm.register_forward_hook(lambda norm, inputs, output: found.append(output))
    features = model.features(images)
    assert found[0].shape[1] == 4 + (pool == "token")
    assert torch.equal(features, model.pool(found[0]))
    save(model, tmp_path / "probed.pt")
    assert torch.equal(load(tmp_path / "probed.pt").eval().features(images), features)


def test_no_classes_means_features(file):
    model, images = load(file, num_classes=0).eval(), torch.rand(2, 3, 8, 8)
    assert torch.equal(model(images), tiny().eval().features(images))
    assert load(file, num_classes=0, representation=False).representation is None


def test_another_image_size_resamples_the_positions(file):
    model = load(file, image_size=(8, 16))
    assert model.config.grid == (2, 4)
    assert model(torch.rand(1, 3, 8, 16)).shape == (1, 5)
    assert torch.equal(
        model.positions, resample_positions(tiny().positions.detach(), (2, 4), "zoom", tiny().config.grid)
    )
    assert same_values(model, tiny(), but=("positions",))

    save(model, file)  # a table that is not square can be saved, too
    assert load(file, image_size=(12, 8)).config.grid == (3, 2)


def test_pixels_beyond_the_last_patch_are_not_seen(file):
    """As in the official code: ViT-H/14 is fine-tuned at 384 px with 27 x 27 patches (ViT paper, Table 5)."""
    model = load(file, image_size=(10, 12))
    assert (model.config.grid, model.config.unseen) == ((2, 3), (2, 0))
    images = torch.rand(2, 3, 10, 12)
    assert torch.equal(model.eval()(images), load(file, image_size=(8, 12)).eval()(images[:, :, :8]))
    save(model, file)
    assert load(file).config == model.config

    assert configure("ViT-H/14", 384, covered=False).grid == (27, 27)
    with pytest.raises(UserError, match="378 or 392"):
        configure("ViT-H/14", 384)


def test_gelu_and_dropout_default_to_the_files(file, npz):
    assert (load(file).config.gelu, load(file).config.dropout) == ("erf", 0.1)
    assert load(file, dropout=0.0).config.dropout == 0
    assert (load(npz()).config.gelu, load(npz(), dropout=0.2).config.dropout) == ("tanh", 0.2)


def one_line(path, **changes):
    with pytest.raises(UserError) as error:
        load(path, **changes)
    assert str(path) in str(error.value)
    return str(error.value)


def test_a_damaged_file_is_refused(file):
    whole = file.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        one_line(file)


def test_a_file_is_read_by_its_content(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"\x08\x0a\x12\x07pytorch" + bytes(1000))
    one_line(tmp_path / "a.onnx")
    save(tiny(), tmp_path / "weights.onnx")
    assert same_values(load(tmp_path / "weights.onnx"), tiny())


def test_a_flipped_bit_anywhere_in_a_torch_file_is_refused(tmp_path):
    torch.save(tiny().state_dict(), file := tmp_path / "model.pth")
    whole = bytearray(file.read_bytes())
    where = whole.find(tiny().positions.detach().numpy().tobytes())
    assert where > 0
    whole[where + 40] ^= 1
    file.write_bytes(whole)
    assert "damaged, the checksum" in one_line(file)


# ---------------------------------------------------------------------- damaged or unsupported descriptions


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(32, dtype=torch.int64), "should hold floats, but holds int64"),
        (torch.full((32,), torch.nan), "holds 32 NaN or Inf"),
    ],
)
def test_weights_are_finite_floats(tmp_path, tensor, message):
    save(tiny(), tmp_path / "model.safetensors")
    metadata = safetensors_metadata(tiny().config, {})
    state = load_file(tmp_path / "model.safetensors") | {"norm.bias": tensor}
    save_file(state, tmp_path / "model.safetensors", metadata)
    assert message in one_line(tmp_path / "model.safetensors")
