"""Command: a demonstration on a CPU without downloads: shard, pre-train, kill, resume, fine-tune, score.

Run the whole pipeline on a CPU, in minutes, without downloads: shard generated images with Ray, pre-train a small
ViT on them with 2 DeepSpeed ranks, kill and resume it, fine-tune it at a higher resolution on real scans, and
score the result.
"""

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data_tools.demo import make_digits, make_shapes
from pipeline.base.errors import UserError
from pipeline.settings import schema
from pipeline.settings.command import main
from pipeline.settings.commands.data import ShardConfig
from pipeline.settings.commands.reports import RunReportConfig
from pipeline.settings.commands.weights import ScoreConfig
from pipeline.settings.quantities import PathText
from pipeline.settings.schema import Settings, setting


class DemoConfig(Settings):
    out: PathText = setting("runs/demo", output="folder")
    """Folder for all results of the demo; an earlier demo there is replaced."""
    num_per_class: int = setting(400, min=1)
    """Number of generated images of each shape."""
    finetune_epochs: int = setting(0, min=0)
    """Epochs of fine-tuning; 0 uses train.length of configs/demo/finetune.yaml."""
    ranks: int = setting(2, min=1)
    """Number of DeepSpeed ranks."""


def demo(config: DemoConfig) -> None:
    out = Path(config.out)
    # Made first, and unlikely in a folder of anything else, which must not be removed.
    if out.exists() and not (out / "raw" / "shapes").is_dir() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not a demo's folder: choose another one with out=...")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    begin = time.perf_counter()

    title("1/5  Shard generated shapes and scikit-learn's scans of digits, with Ray")
    from data_tools.sharding import shard  # Late: --help needs no Ray.
    from pipeline.cluster import ray_tasks

    make_shapes(out / "raw" / "shapes", config.num_per_class)
    make_digits(out / "raw" / "digits")
    for name, extra in (("shapes", ["val_share=0.1"]), ("digits", ["splits.train=train", "splits.test=test"])):
        folders = [f"source={out / 'raw' / name}", f"out={out / name}", "samples_per_shard=512"]
        shard.run(schema.load(ShardConfig, None, [*folders, *extra]))
    ray_tasks.disconnect()

    title("2/5  Pre-train on the shapes; SIGKILL half-way")
    pretrain = command(config, "pretrain", [f"data.path={out / 'shapes'}"])
    run_and_kill(pretrain, out / "pretrain" / "checkpoints" / "latest")

    title("3/5  Run the same command again: it resumes from the last checkpoint")
    check(pretrain)

    title("4/5  Fine-tune on the digits at 40 px")
    length = [f"train.length={config.finetune_epochs} epochs"] if config.finetune_epochs else []
    check(command(config, "finetune", [f"data.path={out / 'digits'}", f"init.weights={out / 'pretrain'}", *length]))

    title("5/5  Score")
    from pipeline.evaluate import score_report  # Late: --help needs no torch.
    from pipeline.monitor.metrics_file import by_name, read_metrics
    from pipeline.monitor.tracking import default_uri
    from pipeline.review import report as run_report

    store = default_uri(out)
    digits = [f"data={out / 'digits'}", "split=test", f"mlflow={store}", "experiment=demo"]
    finetuned = score_report.run(schema.load(ScoreConfig, None, [f"weights={out / 'finetune'}", "shots=0", *digits]))
    probed = score_report.run(
        schema.load(ScoreConfig, None, [f"weights={out / 'pretrain'}", "shots=5", "classify=false", *digits])
    )

    speeds = by_name(read_metrics(out / "pretrain" / "metrics.jsonl")[0])["images_per_second"].values()
    summary = {
        "pretrain_top1": json.loads((out / "pretrain" / "scores.json").read_text())["top1"],
        "finetune_top1": finetuned["top1"],
        "fewshot_top1": probed["fewshot"][0]["top1"],
        "images_per_second": statistics.median(speeds),
        "seconds": time.perf_counter() - begin,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    from pipeline.monitor.mlflow.connection import connect, how_to_open  # Late: imports MLflow.

    page = how_to_open(store, connect(store).get_experiment_by_name("demo").experiment_id)
    title("Done")
    told = run_report.run(schema.load(RunReportConfig, None, [f"run={out / 'finetune'}"]))
    print(f"""
  pre-training on shapes, 32 px: top-1 on held-out images      {summary["pretrain_top1"]:8.1%}
  fine-tuning on digits, 40 px: top-1 on held-out scans        {summary["finetune_top1"]:8.1%}
  5-shot linear on digits, features of the shapes' model       {summary["fewshot_top1"]:8.1%}
  images/s in pre-training, median                             {summary["images_per_second"]:8.0f}
  seconds in total                                             {summary["seconds"]:8.0f}

  Written to {out / "summary.json"}; figures and tables are in {out / "finetune" / "evaluate"}.
  All about the fine-tuned run, on one page: {told}
  To see the runs in a browser: {page}
""")


def command(config: DemoConfig, name: str, overrides: list[str]) -> list[str]:
    """Returns the command line of launch/NAME.py on `config.ranks` local ranks, by torchrun, which starts them sooner
    than deepspeed.
    """
    launcher = [str(Path(sys.executable).parent / "torchrun"), "--standalone", f"--nproc_per_node={config.ranks}"]
    settings = ["--config", str(ROOT / "configs" / "demo" / f"{name}.yaml"), f"out={config.out}", *overrides]
    return [*launcher, str(ROOT / "launch" / f"{name}.py"), *settings]


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
    main(DemoConfig, demo, __doc__)
