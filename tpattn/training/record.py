"""What a run tells and records of its steps: metrics.jsonl and .csv, TensorBoard's files, lines and a bar. One rank does this."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from tpattn.errors import Unsupported

METRICS = "metrics.jsonl"
TABLE = "metrics.csv"
BOARD = "tensorboard"  # folder
_COLUMNS = ("step", "loss", "grad_norm", "tokens_per_second", "memory_bytes", "comm_share", "valid_loss")
_BAR = 24  # characters
_RECENT = 50  # steps over whose mean the time left is estimated


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


def need_tensorboard() -> None:
    """Unsupported when the package tensorboard is missing. For all ranks, before one of them makes a Record with it."""
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise Unsupported(f'TensorBoard\'s files need the package tensorboard ({error}): pip install "tpattn[tb]"') from error


class Record:
    """Tells of a run's steps: each is a line of metrics.jsonl and of metrics.csv, some are a line of text.

    On a terminal a bar stands below the lines, renewed in place with each step; elsewhere there are only the lines.

    folder      the run's; None = nothing is written. Steps after `done` are cut from what it holds
    steps       number of the last step the run is planned for; done = steps made before this start
    last        the step this start ends with, to which the time left is counted; None = steps
    stream      where the lines go, standard output unless given
    tensorboard also write folder/tensorboard for TensorBoard; steps after `done` that a former start wrote there are hidden
    raises      Unsupported when tensorboard is asked for and not installed
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        steps: int,
        done: int = 0,
        last: int | None = None,
        stream: TextIO | None = None,
        tensorboard: bool = False,
    ) -> None:
        self.steps, self.done, self.last = steps, done, steps if last is None else last
        self.stream = sys.stdout if stream is None else stream
        self._live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self._memory: int | None = None
        self._times: deque[float] = deque(maxlen=_RECENT + 1)  # when each of the last steps ended
        self._told = done  # the step of the last line
        self._early: tuple[int, float] | None = None  # a validation loss whose step is not yet told
        self._files = None if folder is None else _Files(Path(folder), done)
        self._board: Any = None
        if tensorboard and folder is not None:
            need_tensorboard()
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(Path(folder) / BOARD), purge_step=done + 1)

    def step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        tokens_per_second: float,
        memory: int | None = None,
        *,
        comm_share: float | None = None,
    ) -> None:
        """One step is made.

        memory      highest so far on the worst rank, bytes; given for the steps that get a line of text
        comm_share  share of the step's time, 0 to 1, in which this rank waited in communication (`comm.waited`)
        """
        self._times.append(time.monotonic())
        self._told = step
        entry = {"step": step, "loss": loss, "grad_norm": grad_norm, "tokens_per_second": tokens_per_second}
        more = {"memory_bytes": memory, "comm_share": comm_share}
        if self._early is not None and self._early[0] == step:
            more["valid_loss"] = self._early[1]
        self._early = None
        entry |= {name: value for name, value in more.items() if value is not None}
        if self._files is not None:
            self._files.add(entry)
        self._to_board(entry)
        self._memory = self._memory if memory is None else memory
        text = f"step {step:>{len(str(self.steps))}}/{self.steps}   loss {loss:.4f}   grad norm {grad_norm:<6.3g}   "
        text += f"{tokens_per_second:>7,.0f} tokens/s   {(self._memory or 0) / 1e9:.2f} GB"
        text += "" if comm_share is None else f"   {comm_share:>4.0%} comm"
        left = self._left(step)
        if memory is not None:
            self.say(text + ("" if left is None else f"   {_clock(left)} left"))
        if self._live and step < self.last:
            self._draw_bar(step, text, left)

    def valid(self, step: int, loss: float) -> None:
        """The loss on held-out documents with the weights of `step`; before or after that step is told, or of step 0."""
        if step > self._told:
            self._early = step, loss
        elif step == self._told and self._files is not None:
            self._files.amend(step, loss)
        if self._board is not None:
            self._board.add_scalar("loss/valid", loss, step)
        self.say(f"valid {step:>{len(str(self.steps))}}/{self.steps}  loss {loss:.4f}")

    def say(self, text: str = "") -> None:
        """A line of text, above the bar."""
        self.stream.write(("\r\x1b[K" if self._live else "") + text + "\n")
        self.stream.flush()

    def close(self) -> None:
        """End the bar's line and the files."""
        if self._live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
        if self._files is not None:
            self._files.close()
            self._files = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def _left(self, step: int) -> float | None:
        """Seconds to the last step, by the mean of the recent ones; None after the first, which also warmed up, and at the end.

        A step's time runs from line to line, so checkpoints and validation between them are part of it.
        """
        if len(self._times) < 2 or step >= self.last:
            return None
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1) * (self.last - step)

    def _to_board(self, entry: dict[str, Any]) -> None:
        if self._board is None:
            return
        for name, value in entry.items():
            if name != "step":
                tag = {"loss": "loss/train", "valid_loss": "loss/valid"}.get(name, name)
                self._board.add_scalar(tag, value, entry["step"])

    def _draw_bar(self, step: int, text: str, left: float | None) -> None:
        full = round(_BAR * step / self.steps)
        line = f"[{'#' * full}{'.' * (_BAR - full)}] {'' if left is None else f'{_clock(left)} left   '}{text}"
        self.stream.write("\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K")
        self.stream.flush()


class _Files:
    """metrics.jsonl and metrics.csv of one run, which hold the same steps.

    A line is written whole and at once, so that a killed run leaves at most one half line; the next start mends both from
    metrics.jsonl. The value that may come later, valid_loss, is the last of a line: it takes the place of the line's end.
    """

    def __init__(self, folder: Path, done: int) -> None:
        kept = [entry for entry in read_metrics(folder) if entry["step"] <= done]
        starts = "".join(_json_line(entry) for entry in kept), ",".join(_COLUMNS) + "\n" + "".join(map(_csv_line, kept))
        self._open = []
        for name, text in zip((METRICS, TABLE), starts, strict=True):
            path = folder / name
            new = path.with_name(f"{name}.new")
            new.write_text(text)
            new.replace(path)
            file = path.open("r+b", buffering=0)
            file.seek(0, os.SEEK_END)
            self._open.append(file)
        self._entry = kept[-1] if kept else None

    def add(self, entry: dict[str, Any]) -> None:
        self._entry = dict(entry)
        for file, line in zip(self._open, (_json_line, _csv_line), strict=True):
            file.write(line(entry).encode())

    def amend(self, step: int, valid_loss: float) -> None:
        """Adds the validation loss to the last line, once, if that is the step's."""
        name = _COLUMNS[-1]
        if self._entry is None or self._entry["step"] != step or name in self._entry:
            return
        self._entry[name] = valid_loss
        endings = ("}\n", f', "{name}": {json.dumps(valid_loss)}}}\n'), ("\n", f"{valid_loss!r}\n")
        for file, (old, new) in zip(self._open, endings, strict=True):
            file.seek(-len(old), os.SEEK_END)
            file.write(new.encode())

    def close(self) -> None:
        for file in self._open:
            file.close()


def _json_line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def _csv_line(entry: dict[str, Any]) -> str:
    return ",".join("" if entry.get(name) is None else repr(entry[name]) for name in _COLUMNS) + "\n"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
