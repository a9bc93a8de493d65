"""The picture of a run: its loss, and below it how fast it went, from the run's metrics.jsonl."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tpattn.training.record import read_metrics

PICTURE = "loss.png"
_TRAIN, _VALID, _SPEED = "#1f5fa8", "#d1570b", "#4a7d3b"
_MANY = 50  # from so many steps on each single one is drawn pale, and their running mean strong


def draw_loss(folder: str | os.PathLike[str], title: str = "") -> Path:
    """Draws folder/loss.png: the loss of each step, its running mean, the validation losses, and the tokens per second below.

    returns     the picture's path; without any step its axes are empty
    """
    metrics = read_metrics(folder)
    path = Path(folder) / PICTURE
    with _matplotlib_silent():
        from matplotlib.figure import Figure  # here, it takes a third of a second; without pyplot: no window system, no globals
        from matplotlib.ticker import EngFormatter, MaxNLocator

        figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
        loss, speed = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
        _draw_losses(loss, metrics)
        _draw_speed(speed, metrics)
        loss.set_title(title, fontsize="medium", loc="left")
        loss.set_ylabel("loss, nats per token")
        speed.set_ylabel("tokens per second")
        speed.set_xlabel("step")
        speed.xaxis.set_major_locator(MaxNLocator(integer=True))
        speed.yaxis.set_major_formatter(EngFormatter(sep=""))
        for axes in (loss, speed):
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.01)
        figure.align_ylabels()
        figure.savefig(path)
    return path


def _draw_losses(axes: Any, metrics: Sequence[dict[str, Any]]) -> None:
    steps, losses = [m["step"] for m in metrics], [m["loss"] for m in metrics]
    valid = [(m["step"], m["valid_loss"]) for m in metrics if m.get("valid_loss") is not None]
    many = len(steps) >= _MANY
    if many:
        axes.plot(steps, losses, color=_TRAIN, linewidth=0.8, alpha=0.35, label="training, each step")
        axes.plot(steps, _running_mean(losses, len(steps) // 25), color=_TRAIN, linewidth=2, label="training, running mean")
    elif steps:
        axes.plot(steps, losses, color=_TRAIN, linewidth=2, marker="o", markersize=3, label="training")
    if valid:
        axes.plot(*zip(*valid, strict=True), color=_VALID, linewidth=1.5, marker="o", markersize=4, label="validation")
    if many or valid:
        axes.legend(frameon=False)


def _draw_speed(axes: Any, metrics: Sequence[dict[str, Any]]) -> None:
    """The running median: single slow steps, such as the first or one behind a checkpoint, do not bend it."""
    timed = [(m["step"], m["tokens_per_second"]) for m in metrics if m.get("tokens_per_second") is not None]
    if not timed:
        return
    steps, speeds = [step for step, _ in timed], [speed for _, speed in timed]
    if len(steps) >= _MANY:
        axes.plot(steps, speeds, color=_SPEED, linewidth=0.8, alpha=0.35)
        width = len(steps) // 25
        speeds = [median(speeds[max(0, i - width) : i + width + 1]) for i in range(len(speeds))]
    axes.plot(steps, speeds, color=_SPEED, linewidth=1.5)
    axes.set_ylim(bottom=0)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Each value's mean with its neighbours, up to `width` on either side, at the steep start as many as there are before it."""
    near = [values[i - r : i + r + 1] for i, r in enumerate(min(width, i) for i in range(len(values)))]
    return [sum(some) / len(some) for some in near]


@contextmanager
def _matplotlib_silent() -> Iterator[None]:
    """At a first start, or without a home folder, matplotlib logs where it keeps its font cache: nothing to act on."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
