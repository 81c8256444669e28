"""The launcher's ears: signals that ask it to stop, and the end of its children, which both end a wait."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from types import FrameType
from typing import Any

from service.launch.processes import LAUNCHER_SIGNALS


class StopSignals:
    """Notes the first stop signal between `install` and `remove`. Outside the main thread nothing is heard."""

    def __init__(self) -> None:
        self.number = 0
        """What to hand on to the workers, 0 before any signal: the first one received, SIGTERM for SIGHUP."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_handlers: list[tuple[int, Any]] = []

    def install(self) -> None:
        """Take the signals from here on, and those that were held back while this program was loaded (service.cli)."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in LAUNCHER_SIGNALS:
            # Under nohup the launcher stays deaf to SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._old_handlers.append((number, signal.signal(number, self._note)))
        # The handler does nothing, but the end of a child then ends `sleep`.
        self._old_handlers.append((signal.SIGCHLD, signal.signal(signal.SIGCHLD, lambda *_: None)))
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_SIGNALS)

    def remove(self) -> None:
        """Put back what was there before."""
        if self._old_handlers:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
            signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers:
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def sleep(self, seconds: float) -> None:
        """Wait; a signal or the end of a child ends it early."""
        select.select([self._read], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 512):
                pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number == 0:
            self.number = signal.SIGTERM if number == signal.SIGHUP else number
