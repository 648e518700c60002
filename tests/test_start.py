"""What a rank imports before it trains."""

import subprocess
import sys


def test_a_rank_waits_for_nothing_that_nobody_uses() -> None:
    """Neither MLflow nor Inductor, which are both there for whoever asks for them later."""
    code = (
        "import sys, pipeline.engine; "
        "print([name for name in ('mlflow', 'torch._inductor.compile_fx') if name in sys.modules]); "
        "import mlflow, deepspeed.runtime.compiler as compiler; "
        "print(mlflow.__name__, compiler.compile.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "mlflow compile"], done.stdout
