"""A complete run: set up, train, end. The same command starts, resumes and finishes it.

Pre-training and fine-tuning differ only in their settings: fine-tuning has `init.weights`.
"""

from pipeline.base.errors import Stopped
from pipeline.lifecycle.stop import Stop
from pipeline.settings.run import RunConfig
from pipeline.train.loop import train_on_all_ranks
from pipeline.train.setup import set_up
from pipeline.train.start import Prepared, prepare
from pipeline.train.training_run import TrainingRun


def run_training(config: RunConfig, draw: str | None = None) -> None:
    """Run training in a process that has already imported everything; otherwise use `start.run`. draw: see `start.prepare`."""
    with Stop(config) as stop:
        train_prepared(stop, prepare(config, draw))


def train_prepared(stop: Stop, prepared: Prepared) -> None:
    """Start or resume a run and train to the end of `train.length`. Raises UserError for a user's mistake.

    A run that is asked to stop commits a checkpoint and ends the process with exit code 75.
    """
    run = set_up(stop, prepared)
    stop.show_end = run.show_end
    progress, console, meter, reason = run.progress, run.context.console, run.monitoring.meter, None
    try:
        reason = _train_until_stopped(run)
    finally:
        run.close(is_finished=reason == "")
    if reason:
        console.say(
            f"stopped by {reason} at step {progress.step:,}, which is committed: the same command resumes it (exit code 75)"
        )
        stop.leave(progress.step, reason)
    stop.show_end("finished", "")
    if progress.start >= prepared.plan.steps:
        console.say("nothing left to do: the run is finished")
        return
    console.say(
        f"finished: {meter.average:,.1f} images/s over {meter.total_seconds:,.0f} s of training, in {run.context.folder}"
    )


def _train_until_stopped(run: TrainingRun) -> str:
    """Train to the end and return "", or, if asked to stop, commit a checkpoint and return the reason."""
    progress, stop, saver = run.progress, run.context.stop, run.saving.saver
    try:
        stop.begin_training(progress.start)
        for evaluator in run.evaluators:
            if run.context.ranks.agree(evaluator.is_missing(progress.start)):
                evaluator.evaluate_on_all_ranks(progress.start)
            else:
                evaluator.mark_best_again(progress.start)
        run.context.console.open_bar(progress.start, run.context.plan.steps)
        train_on_all_ranks(run)
        saver.wait()
    except Stopped:  # On all ranks at the same step or evaluation batch.
        run.save_before_stop_on_all_ranks()
        saver.wait()
        return stop.agreed_reason_on_all_ranks()
    stop.committed(progress.step)
    run.report_bad_samples_on_all_ranks()
    return ""
