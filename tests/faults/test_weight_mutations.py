"""Weights files of every format, mutated from a seed: they are read, or refused with one line, and nothing else."""

import json
import random
import resource
import struct
import time

import numpy as np
import pytest
import torch
from model_parts import randomised

from pipeline.base.errors import UserError
from pipeline.model import create, read_weights, save, save_safetensors, to_huggingface, to_npz, to_timm
from pipeline.model.files import write_safetensors

MOST_BYTES = 1 << 30  # That reading a file of some KB may take, beside what the process has.
CLASSES = list("abcde")
VIEW = {"image_size": 8, "eval_crop": "center", "eval_resize": 9, "resize_filter": "antialias"}
# What damaged and hostile JSON holds where something else is expected.
ODD = [
    None, True, -1, 0, 3, 99, 10**12, 10**40, 1e30, 1e-300, "", "x", "8", "a" * 3000, "\n\0", [], {}, [[]], [0.5], [0, 0, 0],
    [8, -8], [1] * 1000, {"": 0}, {"height": -3}, {"0": "cat"}, ["a"] * 5,
]  # fmt: skip


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


def mutated_json(value, rng):
    """One value somewhere in it replaced, left out, or nested thousands deep; or a key renamed."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed = dict(value) if isinstance(value, dict) else list(value)
        if isinstance(changed, dict) and rng.random() < 0.15:
            moved = changed.pop(key)
            return changed if rng.random() < 0.5 else {**changed, f"{key}x": moved}
        changed[key] = mutated_json(value[key], rng)
        return changed
    return rng.choice(ODD)


def json_text(value, rng):
    text = json.dumps(value)
    kind = rng.random()
    if kind < 0.8:
        return text.encode()
    if kind < 0.85:
        return ("[" * 100_000).encode()
    if kind < 0.9:
        return text.replace("8", "9" * 5000, 1).encode()
    return flipped(text.encode(), rng)


def safetensors_parts(content):
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def mutated_safetensors(content, rng):
    header, data = safetensors_parts(content)
    kind = rng.random()
    if kind < 0.3:
        return flipped(content, rng)
    if kind < 0.65:  # our metadata
        ours = mutated_json(json.loads(header["__metadata__"]["vit-weights"]), rng)
        header["__metadata__"]["vit-weights"] = json_text(ours, rng).decode("utf-8", "replace")
    elif kind < 0.75:  # a tensor of another type and size
        tensor = header[rng.choice([name for name in header if name != "__metadata__"])]
        tensor["dtype"] = rng.choice(["I64", "F16", "C64", "F8_E4M3", "BOOL", "F4", "U8", "X"])
        tensor["shape"] = rng.choice([[10**12], [0], [], [10**6, 10**6], tensor["shape"]])
    else:
        header = mutated_json(header, rng)
    written = json_text(header, rng)
    return struct.pack("<Q", rng.choice([len(written)] * 9 + [10**12])) + written + data


@pytest.fixture
def memory():
    """Bytes of address space that a mutation may take are limited, so that a huge allocation is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


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


FORMATS = {
    "ours.safetensors": 200, "ours.pt": 120, "official.npz": 120, "timm.pth": 20, "timm": 120, "huggingface": 200,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_mutated_weights_are_read_or_refused(form, tmp_path, memory):
    path, files = write_seed(form, tmp_path)
    whole = {file: file.read_bytes() for file in files}
    expected = outcome(path)
    assert expected is not None
    num_refused, start = 0, time.process_time()
    for seed in range(FORMATS[form]):
        rng = random.Random(f"{form} {seed}")
        file = rng.choice(files)
        if file.suffix == ".json":
            changed = json_text(mutated_json(json.loads(whole[file]), rng), rng)
        elif file.suffix == ".safetensors":
            changed = mutated_safetensors(whole[file], rng)
        else:
            changed = flipped(whole[file], rng)
        file.write_bytes(changed)
        found = outcome(path)
        num_refused += found is None
        # What has checksums of its own (a zip) is refused or unchanged, never another's.
        if found is not None and form in ("ours.pt", "official.npz", "timm.pth"):
            assert all(torch.equal(found[name], expected[name]) for name in expected), seed
        file.write_bytes(whole[file])
    assert num_refused > FORMATS[form] // 5
    assert time.process_time() - start < 60
