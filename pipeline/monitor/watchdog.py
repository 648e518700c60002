"""Ends a run that makes no progress, says why, and knows which waits may last.

A rank waits legitimately where its code announces it (pipeline/process/waits.py): for an object store that is retried,
for a checkpoint that is committed. Meanwhile other ranks wait for it in a collective call. So a rank publishes its wait
in the run folder, `hang/wait-00003.json`, and the watchdogs of all ranks count the time without progress only from the
end of such waits. Each wait has a limit, also for a rank that was killed in it: after that it counts no longer.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.base.files import write_text
from pipeline.process import distributed, waits

_EXIT_CODE = 1
# How long a rank waits for the reports of the others, in seconds; the one that speaks for all is given some more.
_REPORT_SECONDS, _SPEAK_SECONDS = 5.0, 2.0
_WAITS_FOR_OTHERS = "(waits for other ranks)"


class Watchdog:
    """Ends a run that makes no progress, and names the rank that the others wait for, with host, step, phase and stack.

    Each rank calls `at` before each phase. After `minutes` without a call and without an announced wait of
    any rank, it writes `<folder>/rank-00003.txt`; the lowest rank that wrote one reads them all. A rank in a collective
    call waits for the others, so the cause is a rank elsewhere, or one that wrote nothing (stopped, swapped out, or its
    host is down). Then all end with code 1. minutes: 0 turns it off. record: called with a line, and whether other
    ranks are the cause, before the end.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        hosts: Sequence[str],
        minutes: float,
        record: Callable[[str, bool], None] = lambda line, lost_others: None,
    ) -> None:
        self.folder, self.rank, self.hosts, self.seconds, self.record = folder, rank, hosts, minutes * 60, record
        self._wait_file = folder / f"wait-{rank:05d}.json"
        self._at = (time.monotonic(), 0, "start")
        self._over = threading.Event()
        self._waited_at = -float("inf")  # When a wait that may last was seen last.
        self._published: waits.Wait | None = None
        self._of_others: dict[int, tuple[str, float]] = {}  # Rank -> (content of its file, time of its limit).
        # Reports of an earlier hang, which are kept to be read. Not known by their age: clocks of hosts differ.
        self._earlier = {file.name: file.stat().st_mtime_ns for file in folder.glob("rank-*.txt")}
        if self.seconds:
            self._withdraw()  # Left by a start that was killed.
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def at(self, step: int, phase: str) -> None:
        """This rank begins a phase of a step: "data", "step", "checkpoint", "evaluation" or "probe".

        All of them have collective calls, but a rank in "step" always waits for the others; elsewhere its stack shows
        it.
        """
        self._at = (time.monotonic(), step, phase)

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.seconds / 4)):
            since, step, phase = self._at
            with contextlib.suppress(OSError):  # The folder may be unreachable.
                self._publish()
                if self._is_waited_for(time.monotonic() - since):
                    self._waited_at = time.monotonic()
            idle = time.monotonic() - max(since, self._waited_at)
            if idle > self.seconds and self._at[0] == since:
                self._end(step, phase, time.monotonic() - since)
                return
        with contextlib.suppress(OSError):
            self._withdraw()

    # ------------------------------------------------------------------ waits that may last
    def _publish(self) -> None:
        """Show the other ranks the wait of this one, if there is one."""
        longest = max(waits.allowed(waits.NOTICE_SECONDS), key=lambda wait: wait.left, default=None)
        if longest is self._published or len(self.hosts) == 1:
            return
        self._published = longest
        if longest is None:
            self._withdraw()
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self._wait_file, json.dumps([longest.left, str(longest)]), durable=False)

    def _withdraw(self) -> None:
        self._wait_file.unlink(missing_ok=True)

    def _is_waited_for(self, seconds: float) -> bool:
        """Whether any rank is in a wait that may last. seconds: without progress, below which other ranks are not
        asked.
        """
        is_own = bool(waits.allowed())
        # A thousand ranks would read the folder each second otherwise.
        if seconds < (waits.NOTICE_SECONDS if self.rank == 0 else self.seconds / 4):
            return is_own
        others = self._waits_of_others()
        if others and self.rank == 0 and not is_own:
            rank, what = next(iter(others.items()))
            waits.say("other ranks", f"rank {rank} on {self.hosts[rank]} waits for {what}")
        return is_own or bool(others)

    def _waits_of_others(self) -> dict[int, str]:
        """Rank -> what it waits for. Limits count from when this rank first saw a wait, as clocks of hosts differ."""
        now, found = time.monotonic(), {}
        for file in sorted(self.folder.glob("wait-*.json")):  # One listing, for any number of ranks.
            rank = int(file.stem.removeprefix("wait-"))
            if rank == self.rank or rank >= len(self.hosts):
                continue
            with contextlib.suppress(FileNotFoundError):  # It has just ended.
                text = file.read_text()
                seconds, what = json.loads(text)
                if self._of_others.get(rank, ("", now))[0] != text:
                    self._of_others[rank] = text, now + seconds
                if self._of_others[rank][1] > now:
                    found[rank] = what
        return found

    # ------------------------------------------------------------------ the end of a run that hangs
    def _end(self, step: int, phase: str, seconds: float) -> None:
        """Report, and end this process. Returns if the run ends by itself meanwhile."""
        waits_for_others = phase == "step" or _is_in_collective()
        marked = f" {_WAITS_FOR_OTHERS}" if waits_for_others else ""
        waited = "".join(f", waiting for {wait}," for wait in waits.in_progress(waits.NOTICE_SECONDS)[:1])
        line = f"{phase} of step {step}{marked}{waited} for {seconds:.0f} s"
        with contextlib.suppress(OSError):
            self._write(line)
        # Ranks notice a hang within about a second of each other.
        if self._over.wait(_REPORT_SECONDS):
            return
        reports = self._read()
        if min(reports, default=self.rank) == self.rank:
            lines = diagnosis(reports, self.hosts, self.folder)
            for text in lines:
                print(text, file=sys.stderr, flush=True)
            self.record(lines[0], waits_for_others)
        else:
            self.record(f"hang: {line}; stack in {self.folder / f'rank-{self.rank:05d}.txt'}", waits_for_others)
            time.sleep(_SPEAK_SECONDS)  # A launcher may end all ranks when one has ended.
        # The main thread waits in a collective or a read, and cannot be interrupted.
        os._exit(_EXIT_CODE)

    def _write(self, line: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"rank-{self.rank:05d}.txt", "w") as file:
            file.write(f"{line}, {socket.gethostname()}, process {os.getpid()}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _read(self) -> dict[int, str]:
        """Returns rank -> first line of its report, once it is there. Reports of an earlier hang are left out."""
        found = {}
        for rank in range(len(self.hosts)):
            file = self.folder / f"rank-{rank:05d}.txt"
            with contextlib.suppress(OSError):
                line, is_whole, _ = file.read_text().partition("\n")
                if is_whole and file.stat().st_mtime_ns != self._earlier.get(file.name):
                    found[rank] = line
        return found


def _is_in_collective() -> bool:
    """Whether the main thread is in a collective call, by its innermost Python frame."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    file = frame.f_code.co_filename if frame else ""
    return file == distributed.__file__ or "/torch/distributed/" in file


def diagnosis(reports: dict[int, str], hosts: Sequence[str], folder: Path) -> list[str]:
    """Lines that name the ranks that the others wait for, first. reports: rank -> "<phase> of step <n> for ..."."""
    lines = [
        f"hang: rank {rank} on {host} does not respond: stopped, out of memory, or its host is down"
        for rank, host in enumerate(hosts)
        if rank not in reports
    ]
    waiting = [rank for rank, report in reports.items() if _WAITS_FOR_OTHERS in report]
    for rank, report in reports.items():
        if rank not in waiting or len(waiting) == len(hosts):
            stack = folder / f"rank-{rank:05d}.txt"
            lines.append(f"hang: rank {rank} on {hosts[rank]} has been in {report}; stack in {stack}")
    if 0 < len(waiting) < len(hosts):
        lines.append(
            f"hang: in a collective call {len(waiting)} of {len(hosts)} ranks wait for them; stacks in {folder}"
        )
    return lines
