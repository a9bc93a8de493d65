"""How a run is asked to stop from outside: SIGTERM, noticed between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """Inside `with StopSignal() as stop`, `stop()` tells whether this process has had SIGTERM, which then ends nothing by itself.

    So a run that is told to leave (by a scheduler, or by torchrun, which passes it on) can finish its step and save. It may come
    more than once. Outside the main thread, where Python takes no signals, nothing is caught.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __call__(self) -> bool:
        return self._asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
