"""The worker's side of metrics: numbers are gathered and sent to the launcher of the node in datagrams.

Nothing here blocks or raises: a run never waits for its metrics and never ends because of them. What a full
socket refuses is kept and sent with the next flush, so a counter loses nothing while its worker lives.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from typing import Any

SOCKET_VARIABLE = "HIERA_METRICS_SOCKET"
MAX_DATAGRAM_BYTES = 32_768
"""Well under the kernel's default send buffer (212992 bytes), so that one datagram always fits."""
MAX_PENDING_OBSERVATIONS = 1000
"""A name; the oldest go first. About a minute of the fastest steps while nobody reads."""


class MetricsClient:
    """Gathers values by name (service.metrics.names, no prefix); sends them about every `interval` seconds.

    `path` None makes a null client, whose methods do nothing. Safe to use from several threads.
    """

    def __init__(self, path: str | None, *, rank: int = 0, local_rank: int = 0, interval: float = 1.0) -> None:
        self._path = path
        self._identity = {"rank": rank, "local_rank": local_rank}
        self._interval = interval
        self._lock = threading.Lock()
        self._set: dict[str, float] = {}
        self._add: dict[str, float] = {}
        self._observe: dict[str, list[float]] = {}
        self._phase: str | None = None
        self._phase_sent = True
        self._next_flush = time.monotonic() + interval
        self._socket: socket.socket | None = None
        if path is not None:
            try:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            except OSError:
                self._path = None

    @classmethod
    def from_env(cls) -> MetricsClient:
        """Client by HIERA_METRICS_SOCKET, RANK and LOCAL_RANK; a null client when the first is unset."""
        path = os.environ.get(SOCKET_VARIABLE) or None
        return cls(path, rank=_environment_int("RANK"), local_rank=_environment_int("LOCAL_RANK"))

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        number = _finite_or_nan(value)
        if self._path is None or number is None:
            return
        with self._lock:
            self._set[name] = number
        self._flush_if_due()

    def add(self, name: str, value: float = 1.0) -> None:
        """Add to a counter; negative and non-finite amounts are ignored."""
        number = _finite_or_nan(value)
        if self._path is None or number is None or not 0 <= number < math.inf:
            return
        with self._lock:
            self._add[name] = self._add.get(name, 0.0) + number
        self._flush_if_due()

    def observe(self, name: str, value: float) -> None:
        """Add one observation to a histogram."""
        number = _finite_or_nan(value)
        if self._path is None or number is None or math.isnan(number):
            return
        with self._lock:
            pending = self._observe.setdefault(name, [])
            pending.append(number)
            if len(pending) > MAX_PENDING_OBSERVATIONS:
                del pending[0]
        self._flush_if_due()

    def phase(self, name: str) -> None:
        """Say what the worker does now (service.metrics.health.PHASES), for /healthz; sent at once."""
        if self._path is None:
            return
        with self._lock:
            self._phase_sent = self._phase_sent and name == self._phase
            self._phase = name
        self.flush()

    def flush(self) -> None:
        """Send what is pending; what the socket refuses stays for the next flush."""
        if self._path is None:
            return
        with self._lock:
            self._next_flush = time.monotonic() + self._interval
            # The phase goes with every datagram, so that losing one does not matter.
            while self._pending() and self._send(self._message()):
                pass

    def close(self) -> None:
        """Flush and forget the socket; the client is a null client afterwards."""
        self.flush()
        with self._lock:
            self._path = None
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.close()
                self._socket = None

    def __del__(self) -> None:
        # A client that is simply dropped, by a test or at the end of a process, is no leak worth a warning.
        if getattr(self, "_socket", None) is not None:
            self._socket.close()  # type: ignore[union-attr]

    def _pending(self) -> bool:
        return bool(self._set or self._add or self._observe or not self._phase_sent)

    def _flush_if_due(self) -> None:
        if time.monotonic() >= self._next_flush:
            self.flush()

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = dict(self._identity)
        if self._phase is not None:
            message["phase"] = self._phase
        if self._set:
            message["set"] = dict(self._set)
        if self._add:
            message["add"] = dict(self._add)
        # 200 numbers of at most 24 characters a name: the few histograms of the table fit in one datagram.
        if self._observe:
            message["observe"] = {name: values[:200] for name, values in self._observe.items()}
        return message

    def _send(self, message: dict[str, Any]) -> bool:
        """Send one message and forget what it carried; False when it was refused or can never be sent."""
        data = json.dumps(message).encode()
        if len(data) > MAX_DATAGRAM_BYTES:
            self._set, self._add, self._observe = {}, {}, {}
            return False
        if self._socket is None or self._path is None:
            return False
        try:
            self._socket.sendto(data, self._path)
        except OSError:
            return False
        self._set, self._add, self._phase_sent = {}, {}, True
        for name, values in message.get("observe", {}).items():
            rest = self._observe[name][len(values) :]
            if rest:
                self._observe[name] = rest
            else:
                del self._observe[name]
        return True


def _environment_int(name: str) -> int:
    try:
        return int(os.environ.get(name, "0"))
    except ValueError:
        return 0


def _finite_or_nan(value: object) -> float | None:
    """`value` as a float, or None when it is none; metrics never raise into the training loop."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
