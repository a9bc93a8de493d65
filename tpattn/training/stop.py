"""How a run is asked to stop from outside: SIGTERM or Ctrl-C, noticed between two steps."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

_AGAIN_SECONDS = 1.0  # a second Ctrl-C after as much is the user's: torchrun sends its own behind the terminal's


class StopSignal:
    """Inside `with StopSignal() as stop`, `stop()` tells whether this process has had SIGTERM or SIGINT.

    These then end nothing by themselves, so a run that is told to leave (by a scheduler, by a person, or by torchrun, which
    passes it on) can finish its step and save. SIGTERM may come more than once; a second Ctrl-C, a second later or more, is
    KeyboardInterrupt. Outside the main thread, where Python takes no signals, nothing is caught.

    name        SIGTERM or Ctrl-C: what this process had first; SIGTERM when it was another rank that had it
    """

    def __init__(self) -> None:
        self.name = "SIGTERM"
        self._asked: float | None = None
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._asked is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked, self.name = now, "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        elif number == signal.SIGINT and now - self._asked > _AGAIN_SECONDS:
            raise KeyboardInterrupt

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
