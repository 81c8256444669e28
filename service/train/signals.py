"""Signals that ask a run to checkpoint and leave.

Imports neither torch nor anything slow: the handlers must be there before the imports that take seconds.
"""

from __future__ import annotations

import signal
from types import FrameType

from service.launch.processes import STOP_SIGNALS


class StopRequest:
    """Remembers the first stop signal; the same or another one arriving later changes nothing."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the first signal received, 0 before any."""

    def install(self) -> None:
        """Handles SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 in this process; call from the main thread."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only a plain store: a handler may run between any two bytecodes of the main thread.
        if self.number == 0:
            self.number = number


def signal_name(number: int) -> str:
    """SIGTERM for 15; the number itself where the platform has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
