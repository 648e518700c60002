"""Pre-training, fine-tuning and evaluation of Vision Transformers: the library behind the commands in `launch/`.

The files beside this one are the ground floor, shared by all rooms: errors, JSON records, files, random numbers, ranks,
console output. `make lint` checks which room may import which (pyproject.toml).
"""
