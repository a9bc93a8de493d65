"""How the benchmark measures: teams of processes that wait, and run in turn when told. Knows no topic and nothing of tpattn but
the ledger; `scripts/benchmark.py` says what the numbers mean.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpattn import ledger

PROCESSES = multiprocessing.get_context("forkserver")
Build = Callable[..., Callable[[], Any]]  # (rank, ranks, **sizes), without the first two if serial -> what is timed
MiB = 2**20  # bytes


@dataclass(frozen=True)
class Side:
    """One of the computations that run in turn.

    label       its first columns
    build       makes what is timed
    sizes       keyword arguments of `build`
    tiny        other values of them for the call that only loads libraries
    sharded     True: a process of one thread for each rank; False: one process with as many threads
    pairs       of a query and a key, times heads, that one thread computes; 0 where no time per pair is asked for
    """

    label: tuple[str, ...]
    build: Build
    sizes: dict[str, Any]
    tiny: dict[str, Any]
    sharded: bool = True
    pairs: float = 0


@dataclass(frozen=True)
class First:
    """The first call of one process: seconds; bytes resident before and at the highest, bytes received."""

    seconds: float
    before: int
    highest: int
    received: int


@dataclass(frozen=True)
class Measured:
    """What became of one side: its processes' first calls, then seconds of each turn (slowest process; all processors')."""

    side: Side
    first: list[First]
    seconds: list[float]
    processor: list[float]

    @property
    def ms(self) -> float:
        """Median milliseconds of a turn."""
        return statistics.median(self.seconds) * 1e3

    @property
    def ns(self) -> float:
        """Median nanoseconds of one thread for a pair in one head."""
        return self.ms * 1e6 / self.side.pairs

    @property
    def peak(self) -> float:
        """MiB that the first call added to the worst process."""
        return max(first.highest - first.before for first in self.first) / MiB

    @property
    def highest(self) -> float:
        """MiB resident in the worst process at the highest moment of the first call."""
        return max(first.highest for first in self.first) / MiB

    @property
    def first_ms(self) -> float:
        """Milliseconds of the first call, of the slowest process."""
        return max(first.seconds for first in self.first) * 1e3

    @property
    def received(self) -> float:
        """MiB received in the first call, mean over ranks."""
        return statistics.mean(first.received for first in self.first) / MiB


def race(sides: list[Side], ranks: int, pairs: int) -> list[Measured]:
    """First calls of all sides one after the other, a warm-up, then `pairs` turns; 0 = the first calls alone."""
    teams = [Team(side, ranks) for side in sides]
    turns = [[team.run() for team in teams] for _ in range(pairs + 1 if pairs else 0)][1:]
    for team in teams:
        team.close()
    measured = []
    for i, team in enumerate(teams):
        seconds, processor = [turn[i][0] for turn in turns], [turn[i][1] for turn in turns]
        measured.append(Measured(sides[i], team.first, seconds, processor))
    return measured


class Team:
    """The processes of one side, with a gloo group among them (none for one process)."""

    def __init__(self, side: Side, ranks: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes = []
        size, threads = (ranks, 1) if side.sharded else (1, ranks)
        for rank in range(size):
            ours, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_serve, args=(theirs, self.folder.name, rank, size, threads, side), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.first: list[First] = self._answers()

    def run(self) -> tuple[float, float]:
        """Seconds of one run, from a barrier on: of the slowest process, and of processors in all processes together."""
        for pipe in self.pipes:
            pipe.send("run")
        seconds, processor_seconds = zip(*self._answers(), strict=True)
        return max(seconds), sum(processor_seconds)

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.send("end")
        for process in self.processes:
            process.join()
        self.folder.cleanup()

    def _answers(self) -> list[Any]:
        try:
            answers = [pipe.recv() for pipe in self.pipes]
        except EOFError:
            sys.exit("a process of the benchmark ended; its error is above")
        return answers


def _serve(pipe: Connection, folder: str, rank: int, size: int, threads: int, side: Side) -> None:
    """The life of one process: build, one tiny call, one measured first call, then runs on request."""
    torch.set_num_threads(threads)
    if size > 1:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    place = (rank, size) if size > 1 else ()
    side.build(*place, **{**side.sizes, **side.tiny})()
    run = side.build(*place, **side.sizes)
    before = _resident(peak=False)
    with ledger() as book:
        seconds, _ = _timed(run, size)
    pipe.send(First(seconds, before, _resident(peak=True), book.bytes()))
    while pipe.recv() == "run":  # sleeps until the other sides are done
        pipe.send(_timed(run, size))
    if size > 1:
        dist.destroy_process_group()


def _timed(run: Callable[[], Any], size: int) -> tuple[float, float]:
    """Seconds, and seconds of processors, of this process."""
    if size > 1:
        dist.barrier()
    start, processor_start = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - processor_start


def _resident(peak: bool) -> int:
    """Bytes of resident memory: now (which also forgets the highest value), or the highest since. 0 where /proc is missing."""
    if not Path("/proc/self/clear_refs").exists():
        return 0
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    word = "VmHWM" if peak else "VmRSS"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) * 1024
