"""The run that the cells of a tiny study share."""

from pathlib import Path

_RUN = """
name: base
model: {name: ViT-Ti/4, image_size: 16, width: 16, depth: 1, mlp_width: 16, num_heads: 2, representation: false}
data: {path: DATA, streams: 4, window: 16, threads: 1}
augment: {eval_crop: resize}
train: {length: 8 steps, global_batch: 24, micro_batch: 24, loss: softmax, log_every: 1, max_skipped_steps: 2}
optimizer: {lr: 1.0e-3}
schedule: {decay: cosine, warmup: 1 steps}
engine: {precision: fp32}
evaluate: {every: 100%}
checkpoint: {every: 50%}
TRACK
"""


def write_run(folder: Path, data: Path, track: str = "{enabled: false, figures: false}") -> Path:
    """Returns a YAML file for `run` of a study. data: its data set. track: the settings of that name."""
    file = folder / "run.yaml"
    file.write_text(_RUN.replace("DATA", str(data)).replace("TRACK", f"track: {track}"))
    return file
