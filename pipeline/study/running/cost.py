"""What a study costs before it runs: FLOPs and hours of every cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.base.progress import duration
from pipeline.base.words import counted
from pipeline.study.results import TO_RUN, CellResult
from pipeline.study.running.cells import Study, new_flops

# What a process costs beside training, in seconds: imports, the first step, evaluation, the last checkpoint.
_SECONDS_OF_A_PROCESS = 20.0
# Share of a matrix product's speed that a training step reaches on a CPU (0.7 for ViT-S/16 in fp32 on an Intel Xeon).
_SHARE_ON_A_CPU = 0.5


@dataclass(frozen=True)
class CostEstimate:
    """hours: of each cell by name, by the clock, alone; empty if the speed is not known. source: of the speed, in words."""

    hours: dict[str, float]
    source: str

    def total(self, names: Sequence[str], at_a_time: int) -> float:
        """Hours of these cells, so many at a time. They may not divide evenly: never less than the longest."""
        hours = [self.hours[name] for name in names]
        return max(sum(hours) / at_a_time, max(hours, default=0.0))


def estimate(study: Study, results: Sequence[CellResult]) -> CostEstimate:
    """Estimate the hours of every cell. results: of cells that are done, whose speed is used for all.

    Without them, it is the speeds of the models with `minutes`, `tflops` of the settings, or measured here if the cells compute on this CPU.
    """
    config = study.config
    added = {cell.name: flops for job in study.jobs for cell, flops in zip(job, new_flops(job), strict=True)}
    measured: dict[str, list[float]] = {}
    for result in results:
        if result.state == "done" and result.hours:
            measured.setdefault(result.model, []).append(result.hours / added[result.name])
    per_flop = {model: median(values) for model, values in measured.items()}
    if per_flop:
        usual = median(per_flop.values())
        hours = {cell.name: added[cell.name] * per_flop.get(cell.model.name, usual) for cell in study.cells}
        return CostEstimate(hours, f"as measured in {counted(sum(map(len, measured.values())), 'cell')} of this study")
    # How long it takes depends on the model and the device: measured hours include it.
    compiles = any(cell.run.config.engine.compile for cell in study.cells)
    without = ", without the time to compile the models (engine.compile)" if compiles else ""
    fixed = {cell.name: _SECONDS_OF_A_PROCESS * (1 + len(cell.finetunes)) / 3600 for cell in study.cells}
    if config.minutes:
        rates = {cell.name: cell.model.speed * cell.flops_per_image * 3600 for cell in study.cells}
        return CostEstimate(
            {name: flops / rates[name] + fixed[name] for name, flops in added.items()},
            f"at the models' speeds{without}",
        )
    devices = max(1, config.gpus)
    if config.tflops:
        rate, source = config.tflops * 1e12 * devices, f"with {devices} x {config.tflops:g} TFLOP/s (tflops)"
    elif config.on == "here" and not config.gpus:
        rate = _SHARE_ON_A_CPU * _speed_of_this_cpu()
        source = f"with {rate / 1e12:.2g} TFLOP/s, {_SHARE_ON_A_CPU:.0%} of what this CPU reaches in a matrix product"
    else:
        return CostEstimate({}, "of unknown speed: set tflops=..., what a device keeps up in training")
    return CostEstimate({name: flops / rate / 3600 + fixed[name] for name, flops in added.items()}, source + without)


def _speed_of_this_cpu() -> float:
    """FLOP/s of a matrix product on all threads, from that of one: on a busy host, threads that share a product wait for each other."""
    import torch  # Late: only this measurement needs it.

    from pipeline.monitor.profile import peak_flops

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Of this process, which trains nothing.
    try:
        return threads * peak_flops(torch.device("cpu"), torch.float32, 0.0)[0]
    finally:
        torch.set_num_threads(threads)


def plan_table(study: Study, estimated: CostEstimate, results: Sequence[CellResult], at_a_time: int) -> list[str]:
    """The lines of --plan: every cell with its size, length, compute and hours, and the sums."""
    config = study.config
    width = max(len(cell.name) for cell in study.cells)
    lines = [
        f"{'cell':<{width}}  {'M par.':>7} {'images':>11} {'steps':>9} {'epochs':>7} {'exaFLOPs':>10} {'time':>8}  state"
    ]
    states = {result.name: result.state for result in results}
    for cell in study.cells:
        time = duration(3600 * estimated.hours[cell.name]) if estimated.hours else "-"
        lines.append(
            f"{cell.name:<{width}}  {cell.parameters / 1e6:>7.2f} {cell.data_size:>11,} {cell.steps:>9,} {cell.epochs:>7.1f} "
            f"{cell.flops / 1e18:>10.3g} {time:>8}  {states[cell.name]}"
        )
    added = sum(sum(new_flops(job)) for job in study.jobs)
    left = [cell.name for cell in study.cells if states[cell.name] in TO_RUN]
    summary = f"{counted(len(study.cells), 'cell')}, {list(states.values()).count('done')} of them done; {added / 1e18:.3g} exaFLOPs are computed"
    if estimated.hours and left:
        summary += f"; those left take {duration(3600 * estimated.total(left, at_a_time))} {estimated.source}, {at_a_time} at a time"
        work = sum(estimated.hours[name] for name in left)
        summary += f", {work * config.gpus:,.3g} GPU hours" if config.gpus else ""
    elif left:
        summary += f"; {estimated.source}"
    return [*lines, f"{summary}.", *study.notes]
