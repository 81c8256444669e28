"""What people see of a run: device values read late, metrics.jsonl, a progress bar or lines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from tqdm import tqdm

from hiera_optim.training import StepOutput
from service.errors import UserError
from service.files import replacing


class StepRow(NamedTuple):
    """One optimizer step's values on the host."""

    loss: float
    grad_norm: float
    own_nonfinite: float
    """Above 0 if this rank saw a value that is not finite."""

    @property
    def finite(self) -> bool:
        """False if the step's loss or gradient is not finite; the same on all ranks."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm) and self.own_nonfinite == 0


class StepValues:
    """Losses and norms of the last steps, kept on the device until they are wanted.

    `record` and `send` only enqueue work; `receive` waits for what `send` enqueued, which is over by the
    time a further step has been enqueued behind it.

    Args:
        capacity: most steps between two `send`s.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._rows = torch.zeros(capacity, 3, device=device)
        self._host = torch.zeros(capacity, 3, pin_memory=pinned)
        self._event = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._recorded = 0
        self._sent = 0

    def record(self, output: StepOutput) -> None:
        """Keeps a step's values before the next step overwrites them."""
        row = self._rows[self._recorded]
        row[0].copy_(output.loss)
        row[1].copy_(output.grad_norm)
        row[2].copy_(output.nonfinite)
        self._recorded += 1

    def send(self) -> None:
        """Starts copying the recorded rows to the host; `receive` those of an earlier `send` first."""
        count = self._recorded
        self._host[:count].copy_(self._rows[:count], non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._sent, self._recorded = count, 0

    def receive(self) -> list[StepRow]:
        """The rows of the last `send`, oldest first; none when there was no `send` since."""
        if self._event is not None and self._sent:
            self._event.synchronize()
        rows = [StepRow(*row) for row in self._host[: self._sent].tolist()]
        self._sent = 0
        return rows


class MetricsLog:
    """metrics.jsonl: one JSON object a line, no step twice.

    A killed run leaves lines of steps after its last checkpoint, and perhaps half a line; opening the log
    for a run that goes on from `step` drops them, because those steps come again. Raises UserError when something
    else has its name.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self._validated: set[int] = set()
        kept = []
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file; move it away and run the same command again")
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            event = _event(line)
            if event is not None and event["step"] <= step:
                kept.append(line)
                if "val_loss" in event:
                    self._validated.add(event["step"])
        with replacing(path) as temporary:
            temporary.write_bytes(b"".join(kept))

    def validated(self, step: int) -> bool:
        """Whether a validation at this step is on record."""
        return step in self._validated

    def write(self, event: Mapping[str, Any]) -> str | None:
        """Appends one whole line; returns what went wrong, if anything (a full disk must not end the run)."""
        line = json.dumps({key: _json_number(value) for key, value in event.items()}) + "\n"
        try:
            with open(self._path, "ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if file.write(line.encode()) != len(line):
                    file.truncate(size)
                    return f"{self._path}: the disk is full"
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        return None


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
        return event if line.endswith(b"\n") and isinstance(event["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _json_number(value: Any) -> Any:
    # JSON has no NaN; null is what most readers turn back into one.
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Console:
    """Rank 0's voice: a tqdm bar with loss, samples/s and ETA on a terminal, a line a log event elsewhere."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._bar: tqdm[Any] | None = None
        self._total = 0

    def begin(self, step: int, total: int) -> None:
        """Starts the bar at `step` of `total`, on a terminal."""
        self._total = total
        if self._speaks and _is_terminal(sys.stderr):
            self._bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True, smoothing=0.1)

    def advance(self) -> None:
        """One more step is done."""
        if self._bar is not None:
            self._bar.update()

    def report(self, step: int, loss: float, samples_per_second: float, eta_seconds: float) -> None:
        """Shows the values of a log event."""
        parts = [f"loss {loss:.4f}"]
        if math.isfinite(samples_per_second):  # unknown at the first step
            parts += [f"{samples_per_second:.1f} samples/s", f"{duration(eta_seconds)} left"]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts[:2]), refresh=False)
        else:
            self._print("  ".join([f"step {step}/{self._total}", *parts]), sys.stdout)

    def say(self, text: str) -> None:
        """One line for people."""
        self._print(text, sys.stdout)

    def warn(self, text: str) -> None:
        """One line of warning on stderr."""
        self._print(f"hiera-train: warning: {text}", sys.stderr)

    def _print(self, text: str, stream: TextIO) -> None:
        if not self._speaks:
            return
        # The output may go to the disk that is full, or to a reader that has left.
        with contextlib.suppress(OSError):
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            else:
                print(text, file=stream, flush=True)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _is_terminal(stream: TextIO) -> bool:
    """False also for a terminal without a width, as expect, CI and containers make them: no bar fits it."""
    if not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return True


def duration(seconds: float) -> str:
    """1:02:03 for 3723 seconds; 2 d 1:00:00 from a day on; ? when unknown."""
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{f'{days} d ' if days else ''}{h}:{m:02}:{s:02}"
