"""Weights files of every format, with bytes changed, left out or cut off, from a seed: they are read, or refused with one line, and nothing else."""

import json
import random

import numpy as np
import pytest
import torch
from model_parts import randomised

from pipeline.base.errors import UserError
from pipeline.model import create, read_weights, save, save_safetensors, to_huggingface, to_npz, to_timm
from pipeline.model.files import write_safetensors

CLASSES = list("abcde")
VIEW = {"image_size": 8, "eval_crop": "center", "eval_resize": 9, "resize_filter": "antialias"}


def tiny():
    return randomised(create("ViT-mu/4", 8, len(CLASSES), gelu="erf"), 0.1)


def outcome(path):
    """The state that the file holds, or None where it is refused. Any other exception fails the test."""
    try:
        return read_weights(path)[1]
    except UserError as error:
        line = str(error)
    assert line.isprintable()
    assert len(line) < 2000, line
    return None


def flipped(content, rng):
    """1 to 4 bytes changed, a part left out, doubled or cut off."""
    content = bytearray(content)
    # Headers and directories lie at the ends, where a change says most.
    start = rng.choice([0, 0, max(len(content) - 2000, 0), rng.randrange(len(content))])
    place = min(start + rng.randrange(2000), len(content) - 1)
    kind = rng.choice(["bytes", "bytes", "bytes", "cut", "left out", "doubled"])
    if kind == "bytes":
        for _ in range(rng.randint(1, 4)):
            content[min(place + rng.randrange(8), len(content) - 1)] = rng.choice([0, 255, 127, rng.randrange(256)])
    elif kind == "cut":
        del content[place:]
    elif kind == "left out":
        del content[place : place + rng.randint(1, 64)]
    else:
        content[place:place] = content[place : place + rng.randint(1, 64)]
    return bytes(content)


def write_seed(form, folder):
    """A whole file or folder of a format -> (what to read, the files to mutate)."""
    model = tiny()
    extra = {"classes": CLASSES, "preprocessing": VIEW, "loss": "softmax"}
    if form == "ours.safetensors":
        save_safetensors(model, folder / form, extra)
    elif form == "ours.pt":
        save(model, folder / form, extra)
    elif form == "official.npz":
        np.savez(folder / form, **to_npz(model))
    elif form == "timm.pth":
        torch.save(to_timm(create("ViT-Ti/16", 16, 2), None, {})[0], folder / form)
    else:
        if form == "timm":
            tensors, config = to_timm(model, CLASSES, VIEW)
            processor = None
        else:
            tensors, config, processor = to_huggingface(model, CLASSES, VIEW)
        write_safetensors(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        if processor is not None:
            (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return folder, [folder / "config.json", *([folder / "preprocessor_config.json"] if processor else [])]
    return folder / form, [folder / form]


FORMATS = {"ours.safetensors": 100, "ours.pt": 60, "official.npz": 60, "timm.pth": 10, "timm": 60, "huggingface": 60}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_mutated_weights_are_read_or_refused(form, tmp_path):
    path, files = write_seed(form, tmp_path)
    whole = {file: file.read_bytes() for file in files}
    expected = outcome(path)
    assert expected is not None
    num_refused = 0
    for seed in range(FORMATS[form]):
        rng = random.Random(f"{form} {seed}")
        file = rng.choice(files)
        file.write_bytes(flipped(whole[file], rng))
        found = outcome(path)
        num_refused += found is None
        # What has checksums of its own (a zip) is refused or unchanged, never another's.
        if found is not None and form in ("ours.pt", "official.npz", "timm.pth"):
            assert all(torch.equal(found[name], expected[name]) for name in expected), seed
        file.write_bytes(whole[file])
    assert num_refused > FORMATS[form] // 5
