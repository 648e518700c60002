"""torch._dynamo is imported when something is compiled, and not before."""

import subprocess
import sys

import pytest

_BEFORE = """
import sys
from pipeline.process.slow_imports import postpone_dynamo, without_collection
postpone_dynamo()
with without_collection():
    import torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weight], lr=0.1)
def step():
    weight.sum().backward()
    optimizer.step()
    return round(weight[0].item(), 4)
assert step() == 0.899, weight
torch.cat([torch.ones(2, device="meta")] * 2)
assert "torch._dynamo.utils" not in sys.modules
"""
_USES = {
    "compile": "assert torch.compile(lambda x: x * 2, backend='eager')(weight).sum() > 5",
    "attribute": "torch._dynamo.reset()",
    "submodule": "import torch._dynamo.config as config; assert config is torch._dynamo.config",
    "own": "from torch._dynamo.testing import CompileCounter as C; assert C is torch._dynamo.testing.CompileCounter",
}
_AFTER = """
package = sys.modules["torch._dynamo"]
assert package is torch._dynamo and package.__file__.endswith("__init__.py")
assert package.utils is sys.modules["torch._dynamo.utils"]
assert step() < 0.85
"""


@pytest.mark.slow
def test_any_other_use_imports_the_package() -> None:
    # In forked processes, because torch takes longer to import than the package.
    in_children = "import os\n" + "".join(
        f"if not os.fork():\n    exec({use + _AFTER!r})\n    os._exit(0)\nassert os.wait()[1] == 0, {name!r}\n"
        for name, use in _USES.items()
    )
    subprocess.run([sys.executable, "-c", _BEFORE + in_children], check=True)
