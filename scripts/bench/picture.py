"""The picture of the topic `memory`: what a rank needs, and how long a call takes, against the length of the sequence."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from bench.race import Measured, MiB

LOOKS = {"color": "C0", "marker": "o"}, {"color": "C1", "marker": "s"}, {"color": "C2", "marker": "^"}


def draw_memory(title: str, measured: list[Measured], path: Path) -> None:
    """Two panels, highest resident memory and seconds of the first call against T; a line for each scheme. Both axes log."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # at a first start it logs where it keeps its font cache
    from matplotlib.axes import Axes  # here, they take a third of a second; without pyplot: no window system, no globals
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    def powers_of_two(axes: Axes) -> None:
        low, high = (math.log2(y) for y in axes.dataLim.intervaly)
        ticks = [2.0**e for e in range(math.floor(low), math.ceil(high) + 1)]
        axes.set_yscale("log", base=2)
        axes.set_yticks(ticks, [f"{y:g}" for y in ticks])
        axes.set_ylim(ticks[0], ticks[-1])

    figure = Figure(figsize=(10, 4.4), dpi=120, layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    lengths = sorted({m.side.sizes["T"] for m in measured})
    schemes = dict.fromkeys(m.side.label[1] for m in measured)  # in order, once each
    for scheme, look in zip(schemes, LOOKS, strict=True):
        mine = [m for m in measured if m.side.label[1] == scheme]
        memory.plot(lengths, [m.highest for m in mine], label=scheme, **look)
        seconds.plot(lengths, [m.first_ms / 1e3 for m in mine], label=scheme, **look)
    before = [max(first.before for m in measured if m.side.sizes["T"] == T for first in m.first) / MiB for T in lengths]
    memory.plot(lengths, before, color="gray", linestyle="--", label="before the call: torch and inputs")
    memory.set_ylabel("highest resident memory of a rank, MiB")
    seconds.set_ylabel("time of one call, s")
    for axes in (memory, seconds):
        powers_of_two(axes)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(T) for T in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("length of the sequence T, tokens")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="upper left")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path)
