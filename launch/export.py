"""Command: convert weights to another format, and compare the logits of both. See `pipeline/evaluate/export.py`.

Convert weights to the format of timm, Hugging Face's transformers or ONNX, or those of other projects
to our .safetensors. If the other library is installed, it reads the result, and both models compute logits
of the same images; if these differ by more than a tolerance, the result is deleted.

  python launch/export.py weights=runs/vit_b16 format=huggingface out=exports/vit_b16
  python launch/export.py weights=runs/vit_b16 out=vit_b16_384.onnx image_size=384   # and a script that predicts
  python launch/export.py weights=facebook/dinov2-base out=dinov2_b14.safetensors
  python launch/export.py weights=runs/mae_vit_b16 format=huggingface_mae out=exports/mae_b16    # with the decoder

docs/weights.md lists what each format can store and what each library computes.
"""

from _repository import command

from pipeline.settings.commands.weights import ExportConfig

if __name__ == "__main__":
    command.main(ExportConfig, "pipeline.evaluate.export", __doc__)
