"""Times several contestants alternately, each time in a separate process."""

import importlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from data_tools.bench.apart import Row, rows_apart
from data_tools.bench.record import BenchRecord, markdown
from pipeline.base.words import counted

_COLUMNS = ("output", "decoder", "filter")
# No contestant takes so long.
_MAX_SECONDS = 86_400.0


@dataclass(frozen=True)
class Contestant:
    """Something to time. name, about: its row in the table. cores: how many it may use.

    run: does the work, and yields the number of images of each batch. module: imported, and prepare: called, before timing
    starts.
    """

    name: str
    about: Sequence[str]
    cores: int
    run: Callable[[], Iterable[int]]
    module: str = "sys"
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timing:
    """rate: images per second of wall-clock time, without the first third of the batches. first: seconds to the first batch.

    per_cpu: images per second of CPU time, including start-up and worker processes.
    """

    rate: float
    per_cpu: float
    first: float


def race(contestants: Sequence[Contestant], rounds: int) -> dict[str, Timing | str]:
    """Returns the median of `rounds` alternating timings of each contestant, or the reason why it was not measured."""
    found: dict[str, list[Timing]] = {contestant.name: [] for contestant in contestants}
    failed: dict[str, str] = {}
    for round_number in range(rounds):
        for contestant in contestants:
            if contestant.name in failed:
                continue
            result = _timed_apart(contestant)
            print(f"round {round_number + 1} of {rounds}: {contestant.name}: {_say(result)}", flush=True)
            if isinstance(result, Timing):
                found[contestant.name].append(result)
            else:
                failed[contestant.name] = result
    return {name: failed.get(name) or _median(timings) for name, timings in found.items()}


def report(
    contestants: Sequence[Contestant], rounds: int, record: BenchRecord, what: str, columns: Sequence[str] = _COLUMNS
) -> None:
    """Time the contestants, add them to the record, and print a table. what: was measured, for its heading. columns: heads of `about`."""
    results, lines = race(contestants, rounds), []
    for contestant in contestants:
        result, about = results[contestant.name], list(contestant.about)
        if isinstance(result, Timing):
            values, said = asdict(result), [f"{result.rate:,.0f}", f"{result.per_cpu:,.0f}", f"{result.first:.2f} s"]
        else:
            values, said = {"failed": result}, [f"not measured: {result}", "", ""]
        record.add(contestant.name, about=about, cores=contestant.cores, **values)
        lines.append([contestant.name, *about, str(contestant.cores), *said])
    print(f"\n{what}; medians of {counted(rounds, 'round')}, alternating\n")
    print(markdown(["", *columns, "cores", "images/s", "images per CPU second", "first batch"], lines))


def _median(timings: Sequence[Timing]) -> Timing:
    return Timing(*(statistics.median(getattr(t, field) for t in timings) for field in ("rate", "per_cpu", "first")))


def _say(result: Timing | str) -> str:
    if isinstance(result, str):
        return f"not measured: {result}"
    return f"{result.rate:,.0f} images/s, {result.per_cpu:,.0f} per CPU second"


def _timed_apart(contestant: Contestant) -> Timing | str:
    """Time in a forked process, so that contestants share no threads, caches or shared memory."""
    row = next(rows_apart(_timed, (contestant,), _MAX_SECONDS))
    return row["failed"] if "failed" in row else Timing(**row)


def _timed(contestant: Contestant) -> Iterator[Row]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: contestant.cores])
    try:
        importlib.import_module(contestant.module)
        contestant.prepare()
        before, started = _cpu_seconds(), time.perf_counter()
        counts, times = [], []
        for count in contestant.run():
            counts.append(count)
            times.append(time.perf_counter() - started)
        used = _cpu_seconds() - before
        yield asdict(Timing(_rate(counts, times), sum(counts) / used, times[0]))
    except ModuleNotFoundError as error:
        yield {"failed": f"{error.name or error} is not installed"}


def _rate(counts: Sequence[int], times: Sequence[float]) -> float:
    """Returns images per second. Of several batches the first third is ignored: new memory and imports slow it down, which
    matters in a run of seconds only."""
    if len(counts) == 1:
        return counts[0] / times[0]
    begin = max(1, len(counts) // 3)
    return sum(counts[begin:]) / (times[-1] - times[begin - 1])


def _cpu_seconds() -> float:
    """Returns user and system time of this process and of its finished children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
