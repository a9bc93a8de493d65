"""Speed, memory and bytes of tpattn on this machine, against torch on one process: a markdown table per topic.

    python scripts/benchmark.py                       # every topic
    python scripts/benchmark.py products --quick      # some topics, small and few: a look, not a measurement
    python scripts/benchmark.py --ranks 4 --pairs 20

Method. `--ranks` (2) processes of one thread each, over gloo, against torch's fastest serial call in one process with as many
threads as there are ranks; float32. Each side sleeps while the other runs. After one warm-up of each, `--pairs` (12) pairs of
serial and sharded run in turn; a pair's ratio is serial time / slowest rank's time, so 1.00 means that sharding costs nothing
and every rank does its part of the work. Shown are the median of the ratios, their quartiles, and the median times. Processor
is the same ratio of processor seconds, summed over the ranks: it does not see waiting, but holds on a busy machine, where the
other one needs many pairs. Peak is the growth of resident memory in the first call, after a tiny one that loads libraries and
connects the ranks: of the worst rank, and of the serial process. Received is what the ledger counts, mean over ranks. Each row
starts fresh processes for both sides. Close other programs first: on two cores a browser is visible in every ratio.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the tpattn beside this script, installed or not

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

Build = Callable[..., Callable[[], Any]]  # (rank, ranks, **sizes) -> what is timed


# ---- topics: what is compared ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One row of a table.

    label       its first columns
    serial      makes the undivided computation
    sharded     makes one rank's part of it
    sizes       keyword arguments of both
    tiny        other values of them for the call that only loads libraries
    """

    label: tuple[str, ...]
    serial: Build
    sharded: Build
    sizes: dict[str, Any]
    tiny: dict[str, Any]


@dataclass(frozen=True)
class Topic:
    """One table: heads of the label columns and the rows."""

    title: str
    heads: tuple[str, ...]
    cases: list[Case] = field(default_factory=list)


def products(quick: bool) -> Topic:
    """The seed's nt, all and tn."""
    T, D = (1024, 96) if quick else (8192, 768)
    topic = Topic(f"Products, T={T}, D={D}, float32", ("product", "offset", "pass"))
    for backward in (False, True):
        for kind, offsets in (("nt", (T, 256, 32)), ("all", (T, 256, 32)), ("tn", (T,))):
            for offset in offsets:
                label = kind, "one message" if offset == T else str(offset), "forward + backward" if backward else "forward"
                sizes = {"kind": kind, "T": T, "D": D, "offset": offset, "backward": backward}
                topic.cases.append(Case(label, serial_product, sharded_product, sizes, {"T": 64, "D": 8}))
    return topic


def _operands(kind: str, T: int, D: int, share: slice, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Left, right and the upstream gradient of the rows in `share`."""
    torch.manual_seed(0)
    t = len(range(T)[share])
    left = torch.randn(t, D if kind == "nt" else T, requires_grad=backward)
    right = torch.randn(t, D, requires_grad=backward)
    return left, right, torch.randn(t, T if kind == "nt" else D)


def serial_product(kind: str, T: int, D: int, offset: int, backward: bool) -> Callable[[], Any]:
    """torch.matmul on the whole."""
    left, right, g = _operands(kind, T, D, slice(None), backward)
    forms: dict[str, Callable[[], Tensor]] = {
        "nt": lambda: torch.matmul(left, right.mT),
        "all": lambda: torch.matmul(left, right),
        "tn": lambda: torch.matmul(left.mT, right),
    }
    return _with_backward(forms[kind], (left, right), g, backward)


def sharded_product(rank: int, ranks: int, kind: str, T: int, D: int, offset: int, backward: bool) -> Callable[[], Any]:
    """The distributed product on this rank's rows."""
    from tpattn.products import distributed_matmul_all, distributed_matmul_nt, distributed_matmul_tn

    left, right, g = _operands(kind, T, D, slice(rank * T // ranks, (rank + 1) * T // ranks), backward)
    forms: dict[str, Callable[[], Tensor]] = {
        "nt": lambda: distributed_matmul_nt(left, right, offset),
        "all": lambda: distributed_matmul_all(left, right, offset),
        "tn": lambda: distributed_matmul_tn(left, right),
    }
    return _with_backward(forms[kind], (left, right), g, backward)


def attention(quick: bool) -> Topic:
    """sequence_attention against scaled_dot_product_attention."""
    topic = Topic("Attention, B=1 H=8 D=64, float32, forward + backward", ("T", "mask", "grid"))
    for T in (1024,) if quick else (1024, 2048, 4096):
        for causal in (False, True):
            for grid in ("ring", "ulysses"):
                sizes = {"T": T, "H": 8, "D": 64, "causal": causal, "grid": grid}
                label = str(T), "causal" if causal else "full", grid
                topic.cases.append(Case(label, serial_attention, sharded_attention, sizes, {"T": 64}))
    return topic


def serial_attention(T: int, H: int, D: int, causal: bool, grid: str) -> Callable[[], Any]:
    """torch's fused attention, with its own causal flag and no mask tensor."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, H, T, D, requires_grad=True) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    return _with_backward(lambda: attend(q, k, v, is_causal=causal), (q, k, v), torch.randn(1, H, T, D), True)


def sharded_attention(rank: int, ranks: int, T: int, H: int, D: int, causal: bool, grid: str) -> Callable[[], Any]:
    """The same over cp: zigzag shares for the causal ring, contiguous ones elsewhere."""
    from tpattn import AttentionGrid, ParallelContext, SequenceLayout, masks, sequence_attention

    ctx = ParallelContext.from_env(dp=1, cp=ranks, device="cpu")
    layout = SequenceLayout.zigzag(T, ranks) if causal and grid == "ring" else SequenceLayout.contiguous(T, ranks)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, layout.sizes[rank], H, D, requires_grad=True) for _ in range(3))
    mask, chosen = masks.causal() if causal else masks.full(), AttentionGrid(**{grid: ranks})

    def attend() -> Tensor:
        out = sequence_attention(q, k, v, ctx=ctx, mask=mask, layout=layout, grid=chosen)
        assert isinstance(out, Tensor)
        return out

    return _with_backward(attend, (q, k, v), torch.randn(1, layout.sizes[rank], H, D), True)


def _with_backward(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], g: Tensor, backward: bool) -> Callable[[], Any]:
    if not backward:
        return forward

    def both() -> None:
        torch.autograd.grad(forward(), inputs, g)

    return both


TOPICS: dict[str, Callable[[bool], Topic]] = {"products": products, "attention": attention}


# ---- the two sides: a team of processes that waits, and runs when told -------------------------------------------------------

PROCESSES = multiprocessing.get_context("forkserver")


@dataclass
class First:
    """The first call of one process: growth of its resident memory in bytes, bytes received."""

    peak: int
    received: int


class Team:
    """`size` processes of `threads` threads with a gloo group among them (none for one process)."""

    def __init__(self, size: int, threads: int, build: Build, sizes: dict[str, Any], tiny: dict[str, Any]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = PROCESSES.Pipe()
            arguments = (theirs, self.folder.name, rank, size, threads, build, sizes, tiny)
            process = PROCESSES.Process(target=_serve, args=arguments, daemon=True)
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


def _serve(
    pipe: Connection, folder: str, rank: int, size: int, threads: int, build: Build, sizes: dict[str, Any], tiny: dict[str, Any]
) -> None:
    """The life of one process: build, one tiny call, one measured first call, then runs on request."""
    torch.set_num_threads(threads)
    if size > 1:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    place = (rank, size) if size > 1 else ()
    build(*place, **{**sizes, **tiny})()
    run = build(*place, **sizes)
    pipe.send(_first(run))
    while pipe.recv() == "run":  # sleeps until the other side is done
        if size > 1:
            dist.barrier()
        start, processor_start = time.perf_counter(), time.process_time()
        run()
        pipe.send((time.perf_counter() - start, time.process_time() - processor_start))
    if size > 1:
        dist.destroy_process_group()


def _first(run: Callable[[], Any]) -> First:
    from tpattn.comm import ledger

    before = _resident(peak=False)
    with ledger() as book:
        run()
    return First(_resident(peak=True) - before, book.bytes())


def _resident(peak: bool) -> int:
    """Bytes of resident memory: now (which also forgets the highest value), or the highest since. 0 where /proc is missing."""
    if not Path("/proc/self/clear_refs").exists():
        return 0
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    word = "VmHWM" if peak else "VmRSS"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) * 1024


# ---- tables ----------------------------------------------------------------------------------------------------------------


def measure(case: Case, ranks: int, pairs: int) -> list[str]:
    """One row: ratios, times, memory, bytes."""
    serial = Team(1, ranks, case.serial, case.sizes, case.tiny)
    sharded = Team(ranks, 1, case.sharded, case.sizes, case.tiny)
    for team in (serial, sharded):
        team.run()  # warm-up
    runs = [(serial.run(), sharded.run()) for _ in range(pairs)]
    for team in (serial, sharded):
        team.close()
    low, ratio, high = statistics.quantiles([one[0] / many[0] for one, many in runs], n=4)
    processor = statistics.median(one[1] / many[1] for one, many in runs)
    one, many = (statistics.median(side[0] for side in sides) * 1e3 for sides in zip(*runs, strict=True))
    peak = max(first.peak for first in sharded.first) / 2**20
    received = statistics.mean(first.received for first in sharded.first) / 1e6
    numbers = [f"**{ratio:.2f}**", f"{low:.2f} to {high:.2f}", f"{processor:.2f}", f"{one:.0f}", f"{many:.0f}"]
    return [*case.label, *numbers, f"{serial.first[0].peak / 2**20:.0f}", f"{peak:.0f}", f"{received:.2f}"]


def table(topic: Topic, ranks: int, pairs: int) -> Iterator[str]:
    """The lines of a topic's markdown table, each as soon as it is known."""
    heads = [*topic.heads, "ratio", "quartiles", "processor", "serial ms", "sharded ms"]
    heads += ["peak serial MiB", "peak rank MiB", "received MB"]
    yield f"\n### {topic.title}\n"
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for case in topic.cases:
        yield "| " + " | ".join(measure(case, ranks, pairs)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topics", nargs="*", help=f"what to measure: {', '.join(TOPICS)}; nothing = all")
    parser.add_argument("--ranks", type=int, default=2, help="sharded processes, and threads of the serial one")
    parser.add_argument("--pairs", type=int, default=None, help="timed pairs per row (12; 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few pairs")
    args = parser.parse_args()
    for name in args.topics:
        if name not in TOPICS:
            parser.error(f"there is no topic {name!r}; there are {', '.join(TOPICS)}")
    pairs = args.pairs or (3 if args.quick else 12)
    if args.ranks < 2 or pairs < 2:
        parser.error(f"--ranks {args.ranks} and --pairs {pairs} must be at least 2")
    PROCESSES.set_forkserver_preload(["torch", "torch.distributed.tensor"])
    n = args.ranks
    print(f"{n} ranks x 1 thread against 1 process x {n} threads, on {os.cpu_count()} cores, torch {torch.__version__}")
    for name in args.topics or TOPICS:
        for line in table(TOPICS[name](args.quick), n, pairs):
            print(line, flush=True)


if __name__ == "__main__":
    main()
