"""Ranks, their devices, and the collective operations that training needs beyond DeepSpeed's."""

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from pipeline.base.errors import CrashError, OneRankCrashError, OneRankError, UserError
from pipeline.base.words import counted
from pipeline.process import waits
from pipeline.process.launcher import free_port, key_of_start

T = TypeVar("T")
# This many missing ranks are named.
_NAMED = 8
_CONNECT_SECONDS = 5.0
# How long all ranks may take to start.
START_MINUTES = 10.0


class StopRequest(Protocol):
    """Lets all ranks leave a loop together. `pipeline.cluster.stop.Stop` implements it; evaluation needs only this."""

    def is_wanted(self) -> bool:
        """Whether this rank has received a request to stop; other ranks may not have."""

    def together(self, items: Iterator[T]) -> Iterator[T]:
        """Yields the items until all ranks agree to stop, then raises Stopped. Collective: ranks need equal numbers of
        items.
        """


@dataclass(frozen=True)
class Ranks:
    """The rank, world size and device of this process, with collective operations: if one rank calls one, all must."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def sum_later(self, value: float) -> Callable[[], float]:
        """Start a sum over ranks without waiting. Returns a function that waits for the sum and returns it."""
        if self.world_size == 1:
            return lambda: value
        total = torch.full((), value, device=self.device)
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        wait: Callable[[], object] = work.wait
        found = total
        if self.device.type == "cuda":
            # Copied on a separate stream: on the default stream it would wait for all queued work.
            aside, fetched = _stream_aside(self.device), torch.cuda.Event()
            found, wait = torch.empty((), pin_memory=True), fetched.synchronize
            with torch.cuda.stream(aside):
                work.wait()
                found.copy_(total, non_blocking=True)
                fetched.record()
            total.record_stream(aside)

        def result() -> float:
            wait()
            return float(found)

        return result

    def barrier(self) -> None:
        # A sum, because dist.barrier() needs an explicit device with NCCL.
        self.sum(0.0)

    def agree(self, value: Any) -> Any:
        """Returns rank 0's value on every rank. If the value is an exception, it is raised on every rank."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def on_main(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` on rank 0, and return its result on every rank. A UserError is raised on every rank."""
        value = None
        if self.is_main:
            try:
                value = function(*arguments)
            except UserError as error:
                # All ranks have it from here on, so only rank 0 prints it.
                value = UserError(str(error)) if error.on_one_rank else error
        return self.agree(value)

    def on_all(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function`, which reads files that may be others on another host; returns its result. A UserError ends
        all ranks.
        """
        try:
            return function(*arguments)
        except UserError as error:
            raise OneRankError(str(error)) from error

    def gather_numbers(self, numbers: Mapping[str, Sequence[float]]) -> dict[str, list[list[float]]]:
        """Returns under each name the numbers of all ranks, in rank order, in float64; by one call for all names.

        All ranks give the same names, and as many numbers under each.
        """
        rows = [[float(number) for of_name in numbers.values() for number in of_name]]
        if self.world_size > 1:
            own = torch.tensor(rows, dtype=torch.float64, device=self.device)
            found = own.new_empty(self.world_size, len(rows[0]))
            dist.all_gather_into_tensor(found, own)
            rows = found.tolist()
        ends = accumulate(map(len, numbers.values()), initial=0)
        return {
            name: [row[begin:end] for row in rows] for name, (begin, end) in zip(numbers, pairwise(ends), strict=True)
        }

    def gather(self, value: Any) -> list[Any]:
        """Returns the picklable values of all ranks, in rank order, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


def from_environment() -> Ranks:
    """Returns the ranks that the launcher (deepspeed, torchrun) set; without a launcher, a world of one rank."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise OneRankError(
                f"LOCAL_RANK = {local_rank}, but {socket.gethostname()} has {counted(torch.cuda.device_count(), 'GPU')}"
                " for this process. Start as many ranks as there are GPUs (deepspeed --num_gpus; CUDA_VISIBLE_DEVICES"
                " hides others)."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    return Ranks(int(os.environ["RANK"]), local_rank, int(os.environ["WORLD_SIZE"]), device)


@contextlib.contextmanager
def all_started(ranks: Ranks, meet: Callable[[bool], None] = lambda hosts_store: None) -> Iterator[None]:
    """Enter the block, which initialises the process group, once all ranks have come here. Collective.

    A rank that waits says for which ranks. Raises CrashError after START_MINUTES, and when rank 0 has ended, because
    the ranks meet there. meet: called once they can; whether this rank is to host the store where they do.
    """
    if ranks.world_size == 1:
        yield
        return
    # One rank of each host, and rank 1, because rank 0 may be the one that is missing.
    speaks = ranks.local_rank == 0 or ranks.rank == 1
    say = partial(print, file=sys.stderr, flush=True) if speaks else lambda line: None
    crash = OneRankCrashError if speaks and not ranks.is_main else CrashError
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    count = key_of_start("started")
    names = [f"{count}/{rank}" for rank in range(ranks.world_size)]
    # Torch's own store joins this one on rank 0. Torchrun's agent has one already.
    hosts_it = ranks.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    with waits.waiting(f"rank 0 to start, on {address}:{port}", 60 * START_MINUTES, say=say) as wait:

        def pause() -> None:
            if wait.left <= 0:
                raise crash(f"waited in vain for {wait}: killed, or not started by the launcher.")
            time.sleep(min(0.02 + wait.age / 10, 1.0))

        while not hosts_it and not _listens(address, port):  # Torch would print stack frames at the limit.
            pause()
        try:
            meet(hosts_it)
            store = dist.TCPStore(
                address,
                port,
                None,
                hosts_it,
                timedelta(minutes=START_MINUTES),
                wait_for_workers=False,
                multi_tenant=True,
            )
            store.set(names[ranks.rank], "")
            store.add(count, 1)
            while store.add(count, 0) < ranks.world_size:
                if speaks and wait.age > waits.NOTICE_SECONDS / 2:
                    missing = [rank for rank, name in enumerate(names) if not store.check([name])]
                    wait.what = f"{name_ranks(missing)} to start"
                pause()
        except RuntimeError as error:  # Torch's errors of networks.
            if "EADDRINUSE" in str(error):  # The port was free when the run started.
                raise UserError(
                    f"MASTER_PORT = {port} is in use on this host, or kept for the system. Choose another: deepspeed"
                    " --master_port PORT, torchrun --master_port PORT, or in the environment."
                ) from None
            raise crash(f"rank 0, where the ranks meet ({address}:{port}), ended before all had started.") from None
    yield


def name_ranks(ranks: Sequence[int]) -> str:
    """The ranks for a message, the first of many: "rank 3", "ranks 0, 1"."""
    shown = ", ".join(map(str, ranks[:_NAMED]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}{f' and {len(ranks) - _NAMED} more' if len(ranks) > _NAMED else ''}"


def _listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), _CONNECT_SECONDS):
        return True
    return False


def seed_torch(seed: int, on_gpu: bool) -> None:
    """Seed torch's generators: of the CPU and, if on_gpu, of GPUs."""
    # Without a GPU `torch.manual_seed` notes a stack trace for each kind of device, for milliseconds.
    (torch.manual_seed if on_gpu else torch.default_generator.manual_seed)(seed)


def use_exact_arithmetic(device: torch.device, deterministic: bool = True) -> None:
    """Make a GPU compute float32 as IEEE 754 says, not as TF32, and the same bits each time. Call before the first
    operation.

    deterministic: kernels whose result does not depend on the order in which threads finish; attention's backward pass
    is slower. An operation without such a kernel raises RuntimeError, of which a run says one line before its first
    step (`train/setup.py`). No-op for a CPU, whose kernels are deterministic.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False  # True by default: patch embeddings would differ from a CPU's by 1e-3.
    if deterministic:
        # cuBLAS reads it when it starts, and torch insists on it: with other values products may differ in bits.
        if os.environ.get("CUBLAS_WORKSPACE_CONFIG") != ":16:8":
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        # Not warn_only=True, with which torch leaves the backward passes of flash, memory-efficient and cuDNN attention
        # as they are, and only warns of them.
        torch.use_deterministic_algorithms(True)
        # Otherwise each new tensor is filled, for programs that read uninitialised memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@functools.cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
