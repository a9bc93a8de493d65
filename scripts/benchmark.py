"""Speed, memory and bytes of tpattn on this machine, against torch on one process: a markdown table per topic.

    python scripts/benchmark.py                       # every topic
    python scripts/benchmark.py products --quick      # some topics, small and few: a look, not a measurement
    python scripts/benchmark.py memory --picture memory.png
    python scripts/benchmark.py --ranks 4 --pairs 20

Method. `--ranks` (2) processes of one thread each, over gloo, against torch's fastest serial call in one process with as many
threads as there are ranks; float32 where nothing else is said. The computations that a table compares run in turn, `--pairs`
(12) times; each sleeps while another runs. Times are from a barrier to the slowest rank's end; a ratio is one median over the
other, and the quartiles are those of the ratios within each turn. So serial / sharded = 1.00 means that sharding costs nothing
and every rank does its part of the work. Processor is the same ratio of processor seconds, summed over the ranks: it does not
see waiting, but holds on a busy machine, where the other one needs many pairs. Nanoseconds are of one thread, for one pair of
a query and a key in one head: seconds x threads / (pairs x heads). Peak is the growth of resident memory in the first call,
after a tiny one that loads libraries and connects the ranks: of the worst rank, and of the serial process. Received is what the
ledger counts in that call, mean over ranks. Each computation has fresh processes. Close other programs first: on two cores a
browser is visible in every ratio.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the tpattn beside this script, installed or not

import torch  # noqa: E402
from bench.race import PROCESSES, race  # noqa: E402
from bench.topics import TOPICS, Topic  # noqa: E402


def table(topic: Topic, ranks: int, pairs: int, picture: Path) -> Iterator[str]:
    """The lines of a topic's markdown table, each as soon as it is known."""
    yield f"\n### {topic.title}\n\n{topic.meaning}\n"
    yield "| " + " | ".join(topic.heads) + " |"
    yield "|" + "---|" * len(topic.heads)
    everything = []
    for sides in topic.races:
        measured = race(sides, ranks, 0 if topic.once else pairs)
        everything += measured
        for row in topic.rows(measured):
            yield "| " + " | ".join(row) + " |"
    if topic.draw is not None:
        topic.draw(topic.title, everything, picture)
        yield f"\nPicture: {picture}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topics", nargs="*", help=f"what to measure: {', '.join(TOPICS)}; nothing = all")
    parser.add_argument("--ranks", type=int, default=2, help="sharded processes, and threads of the serial one")
    parser.add_argument("--pairs", type=int, default=None, help="timed turns of each comparison (12; 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few pairs")
    parser.add_argument("--picture", type=Path, default=Path("benchmark.png"), help="where `memory` draws (benchmark.png)")
    args = parser.parse_args()
    for name in args.topics:
        if name not in TOPICS:
            parser.error(f"there is no topic {name!r}; there are {', '.join(TOPICS)}")
    pairs = args.pairs or (3 if args.quick else 12)
    if args.ranks < 2 or pairs < 2:
        parser.error(f"--ranks {args.ranks} and --pairs {pairs} must be at least 2")
    if not args.picture.parent.is_dir():
        parser.error(f"--picture {args.picture}: there is no folder {args.picture.parent}")
    PROCESSES.set_forkserver_preload(["torch", "torch.distributed.tensor", "tpattn"])
    n = args.ranks
    print(f"{n} ranks x 1 thread against 1 process x {n} threads, on {os.cpu_count()} cores, torch {torch.__version__}")
    for name in args.topics or TOPICS:
        for line in table(TOPICS[name](args.quick, n), n, pairs, args.picture):
            print(line, flush=True)


if __name__ == "__main__":
    main()
