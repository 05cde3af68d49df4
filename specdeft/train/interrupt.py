"""Ctrl-C and a polite kill as a flag that a loop looks at, so that it can save before it ends. Knows no loop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Whether a signal asked to stop."""

    asked = False


@contextmanager
def asked_to_stop() -> Iterator[Interrupt]:
    """Inside, the first SIGINT or SIGTERM sets the flag and a second one acts as before.

    In another thread than the main one, where Python hands out no signals, the flag stays down.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signum, handler = before.popitem()
            signal.signal(signum, handler)

    def note(signum: int, frame: FrameType | None) -> None:
        interrupt.asked = True
        restore()

    for signum in SIGNALS:
        before[signum] = signal.signal(signum, note)
    try:
        yield interrupt
    finally:
        restore()
