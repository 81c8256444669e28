"""Is the run of this node advancing? Tells a stuck run from one that compiles, validates or saves.

Judged from what the workers' datagrams say: the phase, where they name one, and the step. A worker
between two steps is stuck when the last step is many times the usual step time ago.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

LAUNCHED = "launched"
"""The phase of workers that have just been started, before the training module runs."""
PHASES = (LAUNCHED, "starting", "compiling", "training", "validating", "saving")
"""What a worker can say it does. `compiling` covers everything up to the first step."""
_BEFORE_TRAINING = (LAUNCHED, "starting", "compiling")


@dataclass(frozen=True)
class Limits:
    """Seconds without progress that are still healthy, by phase.

    Training: `factor` times the usual step time, at least `floor`: a loader that hiccups or a checkpoint
    that is copied takes a few steps' time. Starting and compiling a large model from a cold cache takes
    minutes.
    """

    factor: float = 20.0
    floor: float = 120.0
    starting: float = 3600.0
    other: float = 1800.0


@dataclass
class Health:
    """State of one node; `note_*` are called by the exporter, `report` by its HTTP handler."""

    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    phase: str = LAUNCHED
    step: float | None = None

    def __post_init__(self) -> None:
        self._since = self.clock()
        self._steps: deque[float] = deque(maxlen=51)

    def note_phase(self, phase: str) -> None:
        """A worker says what it does. Progress only when it is something new; every datagram repeats it."""
        if phase in PHASES and phase != self.phase:
            self.phase = phase
            self._since = self.clock()

    def note_start(self) -> None:
        """Workers were started, again perhaps: the step goes back to the checkpoint's."""
        self.phase, self.step = LAUNCHED, None
        self._since = self.clock()

    def note_step(self, step: float) -> bool:
        """A worker reports its step; True when it differs from the last one."""
        if step == self.step:
            return False
        now = self.clock()
        if self.step is not None and step > self.step:
            self._steps.append((now - self._since) / (step - self.step))
        self.step = step
        self._since = now
        if self.phase in _BEFORE_TRAINING:
            self.phase = "training"
        return True

    def note_step_seconds(self, seconds: float) -> None:
        """A worker timed a step; steps are progress even where their number comes only now and then."""
        self._steps.append(seconds)
        self._since = self.clock()
        if self.phase in _BEFORE_TRAINING:
            self.phase = "training"

    def limit(self) -> float:
        """Seconds without progress that are healthy now."""
        if self.phase in _BEFORE_TRAINING:
            return self.limits.starting
        if self.phase != "training":
            return self.limits.other
        usual = median(self._steps) if self._steps else 0.0
        return max(self.limits.floor, self.limits.factor * usual)

    def report(self) -> tuple[bool, dict[str, object]]:
        """(healthy, what /healthz shows)."""
        idle = self.clock() - self._since
        limit = self.limit()
        healthy = idle <= limit
        return healthy, {
            "status": "ok" if healthy else "stuck",
            "phase": self.phase,
            "step": None if self.step is None else int(self.step),
            "seconds_without_progress": round(idle, 1),
            "limit_seconds": round(limit, 1),
        }
