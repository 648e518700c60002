"""Pre-training, fine-tuning and evaluation of Vision Transformers: the library behind the commands in `launch/`.

It consists of rooms only; `make lint` checks which of them may import which (pyproject.toml).
"""
