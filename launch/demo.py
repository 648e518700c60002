"""Command: a demonstration on a CPU without downloads: shard, pre-train, kill, resume, fine-tune, score.

Run the whole pipeline on a CPU, in minutes, without downloads: shard generated images with Ray, pre-train a small
ViT on them with 2 DeepSpeed ranks, kill and resume it, fine-tune it at a higher resolution on real scans, and
score the result.
"""

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _repository import command

from data_tools.demo import make_digits, make_shapes
from pipeline.base.errors import UserError
from pipeline.monitor.tracking import default_uri
from pipeline.settings.quantities import PathText
from pipeline.settings.schema import Settings, setting

ROOT = Path(__file__).resolve().parents[1]


class DemoConfig(Settings):
    out: PathText = setting("runs/demo", output="folder")
    """Folder for all results of the demo; an earlier demo there is replaced."""
    num_per_class: int = setting(400, min=1)
    """Number of generated images of each shape."""
    finetune_epochs: int = setting(0, min=0)
    """Epochs of fine-tuning; 0 uses train.length of configs/demo/finetune.yaml."""


def demo(config: DemoConfig) -> None:
    out = Path(config.out)
    # Made first, and unlikely in a folder of anything else, which must not be removed.
    if out.exists() and not (out / "raw" / "shapes").is_dir() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not a demo's folder: choose another one with out=...")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    title("1/5  Shard generated shapes and scikit-learn's scans of digits, with Ray")
    make_shapes(out / "raw" / "shapes", config.num_per_class)
    make_digits(out / "raw" / "digits")
    for name, *splits in (("shapes", "val_share=0.1"), ("digits", "splits.train=train", "splits.test=test")):
        places = [f"source={out / 'raw' / name}", f"out={out / name}"]
        check([sys.executable, f"{ROOT}/launch/shard.py", *places, "samples_per_shard=512", *splits])

    title("2/5  Pre-train on the shapes; SIGKILL half-way")
    pretrain = training(out, "pretrain", f"data.path={out / 'shapes'}")
    run_and_kill(pretrain, out / "pretrain" / "checkpoints" / "latest")

    title("3/5  Run the same command again: it resumes from the last checkpoint")
    check(pretrain)

    title("4/5  Fine-tune on the digits at 40 px")
    length = [f"train.length={config.finetune_epochs} epochs"] if config.finetune_epochs else []
    check(training(out, "finetune", f"data.path={out / 'digits'}", f"init.weights={out / 'pretrain'}", *length))

    title("5/5  Score: the fine-tuned model, then 5-shot linear probes of the pre-trained one; and a report")
    score = [sys.executable, f"{ROOT}/launch/evaluate.py", f"data={out / 'digits'}", "split=test", "experiment=demo"]
    score.append(f"mlflow={default_uri(out)}")
    check([*score, f"weights={out / 'finetune'}", "shots=0"])
    check([*score, f"weights={out / 'pretrain'}", "shots=5", "classify=false"])
    check([sys.executable, f"{ROOT}/launch/report.py", str(out / "finetune")])
    print(f"\nAll runs in a browser: make mlflow STORE={config.out}/mlflow.db")


def training(out: Path, name: str, *settings: str) -> list[str]:
    """The command line of launch/NAME.py on 2 local ranks, by torchrun, which starts them sooner than deepspeed."""
    launcher = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node=2"]
    return [
        *launcher,
        f"{ROOT}/launch/{name}.py",
        "--config",
        f"{ROOT}/configs/demo/{name}.yaml",
        f"out={out}",
        *settings,
    ]


def check(arguments: list[str]) -> None:
    """Run a command. Raises UserError if it fails; its own output shows the reason."""
    code = subprocess.run(arguments).returncode
    if code:
        raise UserError(f"this command failed with exit code {code}, see above: {' '.join(arguments)}")


def run_and_kill(arguments: list[str], pointer: Path) -> None:
    """Start a command, and kill it and all its ranks with SIGKILL once a second checkpoint is committed."""
    import psutil  # Late: not of Python's own library.

    process = psutil.Popen(arguments)
    seen: set[str] = set()
    while len(seen) < 2:
        if process.poll() is not None:
            raise UserError(f"this command ended before it could be killed, see above: {' '.join(arguments)}")
        if pointer.exists():
            seen.add(pointer.read_text())
        time.sleep(0.1)
    # Not its process group, in which the ranks are not.
    family = [process, *process.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # One that drew figures may have ended just now.
            member.kill()
    psutil.wait_procs(family)
    print("killed")


def title(text: str) -> None:
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    command.main(DemoConfig, demo, __doc__)
