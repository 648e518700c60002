"""Converts weights to another format and verifies the result by comparing logits on the same images; entry point:
`run`.

The written file is loaded by the target program if it is installed (transformers, timm, onnxruntime), else by
this project's own reader, and the output says so.
"""

import importlib.util
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.base.files import new_output
from pipeline.base.words import counted
from pipeline.evaluate.architecture import name_of
from pipeline.model import Config, Model, ResNet, VisionTransformer, ViTConfig, files
from pipeline.model.convert.mae import to_huggingface
from pipeline.model.convert.preprocessing import written_filter
from pipeline.model.weights import TARGET_SCALE, TARGETS
from pipeline.monitor.mlflow.weights import with_local_weights
from pipeline.objectives import mae
from pipeline.objectives.mae import Mae, as_places
from pipeline.settings.commands.weights import ExportConfig

NUM_IMAGES = 4
# Format -> the program that reads it.
_PROGRAMS = {"huggingface": "transformers", "timm": "timm", "onnx": "onnxruntime"}
_FOLDERS = ("timm", "huggingface", "huggingface_mae")  # Formats that are folders.
_SCRIPT = Path(__file__).with_name("onnx_predict.py")  # It needs nothing of this project.
Forward = Callable[[Tensor], Tensor]  # the model's input (B, C, height, width) -> logits (B, K), or features (B, D)


class LogitDifference(NamedTuple):
    """largest: the largest difference of logits. scale: the largest absolute logit."""

    largest: float
    scale: float


def run(config: ExportConfig) -> LogitDifference:
    """Write `config.weights` to `config.out` in its format; prints and returns the difference from the target program.

    Raises UserError for weights that the format cannot hold, and for a difference above the tolerance from the target
    program; then no output is left.
    """
    # ------------------------------------------------------------------ the input
    config, form = with_local_weights(config), config.written_format
    path = files.find_file(Path(config.weights))  # once, because a run in training changes its `latest`
    content = models.read_weights(path, say=print)
    trained = content.config
    # Of numbers, `models.load` makes a head that predicts them in their own units.
    extra = {name: value for name, value in content.extra.items() if name != TARGET_SCALE}
    if note := models.checkpoint_note(extra):
        print(note)
    height, width = trained.image_size
    targets = extra.get(TARGETS, []) if extra.get("loss") == "regression" else []
    predicted = f"numbers: {', '.join(targets)}" if targets else counted(trained.num_classes, "class")
    print(f"read: {name_of(trained)} at {height} x {width} px, {predicted}")

    # ------------------------------------------------------------------ the model to write
    model: Model | Mae | None
    if form == "huggingface_mae":
        model = Mae.from_weights(content, print)
        if model is None:
            raise UserError(f"{path}: holds no decoder of MAE, as a run with train.loss=mae does. Use another format.")
    else:
        model = models.load(
            path,
            image_size=config.image_size,
            num_classes=None if config.head else 0,
            representation=config.head,
            content=content,
            say=print,
        )
    del content  # whose tensors the model has copied

    # ------------------------------------------------------------------ written, and compared with the target program
    out = Path(config.out)
    with new_output(out, form in _FOLDERS) as unfinished:
        _write(model, form, unfinished, extra)
        # After the model is accepted.
        for note in filter(None, _notes(form, model, extra)):
            print(f"{form}: {note}")
        if isinstance(model, Mae):
            name, ours, theirs = _compare_mae(model, unfinished)
            what = "predicted pixels"
        else:
            name, ours, theirs = _compare(model, form, unfinished)
            what = "logits" if model.config.num_classes else "features"
        difference = _accept(name, ours, theirs, what, config.tolerance)
    print(f"written: {out}")
    if form == "onnx":
        assert not isinstance(model, Mae)
        _write_script(out, model.config)
    return difference


def _notes(form: str, model: Model | Mae, extra: dict[str, Any]) -> Iterator[str]:
    """What is to know where the file is used; "" is nothing."""
    view = extra.get("preprocessing", {})
    if form in _FOLDERS:
        yield written_filter(view)
    if isinstance(model, Mae):
        return
    config = model.config
    if extra.get("loss") == "regression":
        if form == "huggingface":
            targets = ", ".join(extra.get(TARGETS, []))
            yield f"it has no place for names of numbers: outputs are {targets}, in this order and in their own units"
    elif config.num_classes and not extra.get("classes"):
        yield f"the weights have no class names: outputs are 0 to {config.num_classes - 1:,} in the order of their head"
    if form == "timm" and extra.get("loss") == "sigmoid" and config.num_classes:
        yield "it has no place for train.loss = sigmoid; where it is used, set loss=sigmoid"


# ---------------------------------------------------------------------- writing


def _write(model: Model | Mae, form: str, path: Path, extra: dict[str, Any]) -> None:
    """Raises UserError for a model that the format cannot hold."""
    view = extra.get("preprocessing", {})
    if isinstance(model, Mae):
        vit = model.backbone
        assert isinstance(vit, VisionTransformer)
        decoder = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("backbone.")}
        tensors, config, processor = to_huggingface(vit, decoder, model.facts, view)
        files.write_folder(path, tensors, {"config.json": config, "preprocessor_config.json": processor})
        return
    classes = extra.get("classes") if model.config.num_classes else None
    if form == "safetensors":
        models.save(model, path, extra)
    elif form == "timm":
        tensors, config = models.to_timm(model, classes, view)
        files.write_folder(path, tensors, {"config.json": config})
    elif form == "huggingface":
        tensors, config, processor = models.to_huggingface(model, classes, view, extra.get("loss"))
        files.write_folder(path, tensors, {"config.json": config, "preprocessor_config.json": processor})
    else:
        _write_onnx(model, path, models.safetensors_metadata(model.config, extra))


def _write_onnx(model: Model, path: Path, metadata: dict[str, str]) -> None:
    """ONNX, for batches of any size; input "images", output "logits"."""
    images = _images(model.config)[:2]  # a batch size other than the one compared, so that a constant batch size fails
    if sum(parameter.numel() for parameter in model.parameters()) * 4 > 2**31:
        raise UserError("an .onnx file holds at most 2 GiB, and these weights are larger. Use another format.")
    if isinstance(model, ResNet):
        # Its PadFusion replaces the zero border by minus infinity; logits differed by 4 % in a test.
        raise UserError(
            "onnxruntime computes BiT's max pooling, which is padded with zeros, wrong. Use another format."
        )
    files.optional("onnxscript", "to write ONNX")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about every optional package
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch calls what it deprecates itself.
            program = torch.onnx.export(
                model,
                (images,),
                dynamo=True,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
                verbose=False,
            )
        assert program is not None
        program.model.metadata_props.update(metadata)
        program.save(path, external_data=False)
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise UserError(f"torch.onnx cannot write this model ({reason}). Use another format.") from error


def _write_script(file: Path, config: Config) -> None:
    """Write the script that predicts classes or numbers by an .onnx beside it, or print why there is none."""
    reason = "the model has no head" if not config.num_classes else ""
    if not config.pixels.is_rgb8:
        reason = f"it would read 8-bit RGB, and the model reads images of {config.pixels.describe()}"
    if reason:
        print(f"onnx: no script that predicts is written: {reason}")
        return
    script = file.with_name(f"{file.stem}_predict.py")
    with new_output(script, is_folder=False) as unfinished:
        shutil.copyfile(_SCRIPT, unfinished)
    print(f"written: {script}, which predicts without this project: python {script} photo.jpg")


# ---------------------------------------------------------------------- other programs


def _other_side(form: str, path: Path, config: Config) -> tuple[str, Forward]:
    """(name, forward) of the program that reads this format, or of our own reader if it is not installed."""
    if program := _PROGRAMS.get(form):
        if form == "onnx" or importlib.util.find_spec(program):
            module = files.optional(program, "to verify the output")
            name = f"{program} {module.__version__}"
            try:
                return name, _forward_of(form, module, path, config)
            except Exception as error:
                raise UserError(
                    f"{name} cannot read {path.name}: {files.one_line(error)}. Use another format, such as"
                    " format=safetensors."
                ) from error
        print(f"{program} is not installed: the output is verified by this project's own reader only")
    return "our own reader", models.load(path, image_size=config.image_size)


def _quiet(transformers: Any) -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _forward_of(form: str, library: Any, path: Path, config: Config) -> Forward:
    """What the program of this format computes of a written model."""
    if form == "onnx":
        session = library.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    if form == "timm":
        model: Forward = library.create_model(f"local-dir:{path}", pretrained=True).eval()
        return model
    _quiet(library)
    if config.num_classes:
        classifier = library.AutoModelForImageClassification.from_pretrained(path, local_files_only=True).eval()
        return lambda images: classifier(images).logits
    encoder = library.AutoModel.from_pretrained(path, local_files_only=True).eval()
    encoder = getattr(encoder, "vision_model", encoder)  # of a model for images and texts
    if not isinstance(config, ViTConfig) or config.pool == "gap":
        return lambda images: encoder(images).last_hidden_state.mean(1)
    if config.pool == "both":

        def class_token_and_mean(images: Tensor) -> Tensor:
            tokens = encoder(images).last_hidden_state
            return torch.cat([tokens[:, 0], tokens[:, -config.num_patches :].mean(1)], dim=1)

        return class_token_and_mean
    # CLIP normalises, and SigLIP pools, only in the pooled output.
    if config.representation or config.embedding_norm or config.pool == "map":
        return lambda images: encoder(images).pooler_output
    return lambda images: encoder(images).last_hidden_state[:, 0]


# ---------------------------------------------------------------------- comparing


@torch.no_grad()
def _compare(model: Model, form: str, path: Path) -> tuple[str, Tensor, Tensor]:
    """Returns (program, our outputs for fixed images, those of the program, which reads the file)."""
    name, forward = _other_side(form, path, model.config)
    images = _images(model.config)
    return name, model(images), forward(images)


def _accept(name: str, ours: Tensor, theirs: Tensor, what: str, tolerance: float) -> LogitDifference:
    """Print and return the difference. Raises UserError above the tolerance. what: the tensors are."""
    if theirs.shape != ours.shape:
        raise UserError(f"{name} computes {tuple(theirs.shape)} {what}, ours {tuple(ours.shape)}: not written.")
    difference = LogitDifference(float((ours - theirs).abs().max()), float(ours.abs().max()))
    said = f"largest difference of {what} {difference.largest:.1e}, largest of {what} {difference.scale:.3g}"
    # Not `>`, which is False for NaN.
    if not difference.largest <= tolerance * difference.scale:
        raise UserError(
            f"{name} differs from ours by more than tolerance = {tolerance:g}: {said}. Not written: use another format"
            " or a larger tolerance."
        )
    print(f"{name} and ours on {NUM_IMAGES} fixed images: {said}")
    return difference


@torch.no_grad()
def _compare_mae(model: Mae, path: Path) -> tuple[str, Tensor, Tensor]:
    """Returns (program, our reconstructions, those of transformers, which reads the folder)."""
    config = model.backbone.config
    assert isinstance(config, ViTConfig)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand((NUM_IMAGES, 3, *config.image_size), generator=generator) * 2 - 1
    noise = torch.rand((NUM_IMAGES, model.num_patches), generator=generator)
    kept, places = as_places(np.sort(noise.argsort(1)[:, : model.num_kept].numpy(), axis=1), model.num_patches)
    ours = model.predict(images, kept, places)
    library = files.optional("transformers", "to verify the output")
    _quiet(library)
    reader = library.ViTMAEForPreTraining.from_pretrained(path, local_files_only=True).eval()
    found = reader(model.as_predicted(images), noise=noise)
    own = mae.loss(model.as_predicted(images), ours, found.mask > 0, config.patch_size, model.normalise)
    print(f"transformers {library.__version__}: loss {float(found.loss):.6g}, ours {float(own):.6g}")
    return f"transformers {library.__version__}", ours, found.logits


def _images(config: Config) -> Tensor:
    """NUM_IMAGES images of uniform noise, always the same."""
    shape = (NUM_IMAGES, config.pixels.num_channels, *config.image_size)
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
