"""Pre-training, fine-tuning and evaluation of Vision Transformers: the library behind the commands in `launch/`.

The files beside this one are the ground floor: errors, JSON of other programs, whole files, random numbers, ranks, what a
person sees. They import nothing of the rooms. Which room may import which is checked by `make lint` (pyproject.toml).
"""
