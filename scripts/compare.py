"""Trains the first steps of a finished run again on one process, and prints both losses side by side.

    python scripts/compare.py runs/ID            its first 5 steps
    python scripts/compare.py runs/ID --steps 20

Ends with 1 when the difference is more than rounding.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the tpattn beside this script, installed or not

from tpattn import ParallelContext, Unsupported  # noqa: E402
from tpattn.config import AttentionConfig, ParallelConfig, deciding, load_dumped, one_message, parts  # noqa: E402
from tpattn.training import Record, read_metrics, train  # noqa: E402

# Relative to the loss. Rounding differs in the order of sums alone, and grows from step to step; bfloat16 has no limit here.
LIMITS = {"float32": 1e-4, "float64": 1e-9}


class Columns(Record):
    """Prints each step's loss beside the one of the run."""

    def __init__(self, run: dict[int, float]) -> None:
        super().__init__(None, steps=max(run))
        self.run, self.worst, self.relative = run, 0.0, 0.0

    def step(self, step: int, loss: float, *others: Any, **more: Any) -> None:
        self.say(f"{step:>6} {self.run[step]:>18.9f} {loss:>18.9f}")
        difference = abs(loss - self.run[step])
        if not difference <= self.worst:
            self.worst, self.relative = difference, difference / abs(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--steps", type=int, default=5, help="how many")
    args = parser.parse_args()
    with one_message():
        columns, ranks, dtype = compare(args.run.expanduser(), args.steps)
    limit = LIMITS.get(dtype)
    verdict = "" if limit is None else ": rounding" if columns.relative <= limit else f": MORE than rounding ({limit:g})"
    print(f"largest difference {columns.worst:.1e}, {columns.relative:.1e} of the loss{verdict}")
    sys.exit(limit is not None and not columns.relative <= limit)


def compare(folder: Path, steps: int) -> tuple[Columns, int, str]:
    """The printed columns, the number of ranks of the run, its dtype."""
    cfg = load_dumped(folder / "config.yaml")
    losses = {entry["step"]: entry["loss"] for entry in read_metrics(folder)}
    wanted = {step: losses[step] for step in range(1, steps + 1) if step in losses}
    if not wanted or len(wanted) < min(steps, max(losses)):
        raise Unsupported(f"{folder}: its metrics.jsonl lacks losses of the first {steps} steps; needed: a run from step 1 on")
    sizes = cfg.parallel.dp, cfg.parallel.cp, cfg.parallel.tp
    ranks = sizes[0] * sizes[1] * sizes[2]
    cfg.parallel, cfg.attention = ParallelConfig(dp=1), AttentionConfig()
    with ParallelContext.single() as ctx:
        run = parts(cfg, ctx)
        columns = Columns(wanted)
        columns.say(f"  step {f'loss, {ranks} rank' + 's' * (ranks > 1):>18} {'loss, 1 process':>18}")
        train(**deciding(cfg, run, ctx), last=max(wanted), record=columns)
    return columns, ranks, cfg.train.dtype


if __name__ == "__main__":
    main()
