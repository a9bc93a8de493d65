"""What a run tells and records: metrics.jsonl, the step line on the terminal, the picture of the loss. One rank does this."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"
PICTURE = "loss.png"
_BAR = 24  # characters


def read_metrics(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl, in order; what a killed process left half written is left out."""
    path = Path(folder) / METRICS
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            found.append(entry)
    return found


class Record:
    """Tells of a run's steps: each is a line of metrics.jsonl, some are a line of text.

    On a terminal a bar stands below the lines, renewed in place with each step; elsewhere there are only the lines.

    folder      the run's; None = nothing is written. Lines of steps after `done` are cut from its metrics.jsonl
    steps       number of the last step; done = steps made before this start
    stream      where the lines go, standard output unless given
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, steps: int, done: int = 0, stream: TextIO | None = None) -> None:
        self.steps, self.done = steps, done
        self.stream = sys.stdout if stream is None else stream
        self._live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self._started, self._memory = time.monotonic(), 0
        self._file: TextIO | None = None
        if folder is not None:
            path = Path(folder) / METRICS
            kept = [entry for entry in read_metrics(folder) if entry["step"] <= done]
            rest = path.with_name(f"{METRICS}.new")
            rest.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
            rest.replace(path)
            self._file = path.open("a")

    def step(self, step: int, loss: float, grad_norm: float, tokens_per_second: float, memory: int | None = None) -> None:
        """One step is made. memory: highest so far on the worst rank, bytes; given for the steps that get a line of text."""
        if self._file is not None:
            entry = {"step": step, "loss": loss, "grad_norm": grad_norm, "tokens_per_second": tokens_per_second}
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        self._memory = self._memory if memory is None else memory
        text = (
            f"step {step:>{len(str(self.steps))}}/{self.steps}   loss {loss:.4f}   grad norm {grad_norm:<6.3g}   "
            f"{tokens_per_second:>7,.0f} tokens/s   {self._memory / 1e9:.2f} GB"
        )
        if memory is not None:
            self.say(text)
        if self._live and step < self.steps:
            self._draw_bar(step, text)

    def say(self, text: str = "") -> None:
        """A line of text, above the bar."""
        self.stream.write(("\r\x1b[K" if self._live else "") + text + "\n")
        self.stream.flush()

    def close(self) -> None:
        """End the bar's line and the file."""
        if self._live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _draw_bar(self, step: int, text: str) -> None:
        made = step - self.done
        left = (time.monotonic() - self._started) / made * (self.steps - step)
        full = round(_BAR * step / self.steps)
        line = f"[{'#' * full}{'.' * (_BAR - full)}] {_clock(left)} left   {text}"
        self.stream.write("\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K")
        self.stream.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def draw_loss(folder: str | os.PathLike[str], title: str = "") -> Path:
    """The picture of the loss over the steps in the run's metrics.jsonl: folder/loss.png."""
    metrics = read_metrics(folder)
    steps, losses = [m["step"] for m in metrics], [m["loss"] for m in metrics]
    path = Path(folder) / PICTURE
    with _matplotlib_silent():
        from matplotlib.figure import Figure  # here, it takes a third of a second; without pyplot: no window system, no globals

        figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        many = len(steps) >= 50
        axes.plot(steps, losses, color="tab:blue", linewidth=1 if many else 2, alpha=0.4 if many else 1, label="each step")
        if many:
            axes.plot(steps, _running_mean(losses, len(steps) // 25), color="tab:blue", linewidth=2, label="running mean")
            axes.legend(frameon=False)
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats per token")
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
        figure.savefig(path)
    return path


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


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Each value's mean with its neighbours, up to `width` on either side."""
    near = [values[max(0, i - width) : i + width + 1] for i in range(len(values))]
    return [sum(some) / len(some) for some in near]
