"""The commands. As modules (`-m launch.NAME`, `vit NAME`), they find _repository.py by this."""

import sys

sys.path += __path__
