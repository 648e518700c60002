"""Command: weights from one format into another, compared on both sides. See `pipeline/evaluate/export.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.settings.weights import ExportConfig


def export(config: ExportConfig) -> None:
    from pipeline.evaluate.export import run  # Late: --help and mistakes in the settings need no torch.

    run(config)


if __name__ == "__main__":
    main(
        ExportConfig,
        export,
        """
        Write weights for another program: timm, Hugging Face's transformers, the official .npz, ONNX, torch.export; or
        weights of those as a .safetensors of ours. What was written is read by the other program, where it is installed,
        and both compute the logits of the same images; above a tolerance nothing stays written.

          python launch/export.py weights=runs/vit_b16 format=huggingface out=exports/vit_b16
          python launch/export.py weights=runs/vit_b16 format=onnx out=vit_b16_384.onnx image_size=384
          python launch/export.py weights=facebook/dinov2-base format=safetensors out=dinov2_b14.safetensors

        docs/weights.md says what each format can hold, and what each program computes.
        """,
    )
