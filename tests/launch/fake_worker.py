"""A worker without torch for tests of the launcher: counts steps, follows a script in FAKE_SCRIPT.

FAKE_SCRIPT is JSON: {"steps": 50, "seconds": 0.05, "on": {"<restart>": "<what>"}, "rank": 0, "at": 3}.
`what` happens on rank `rank` at step `at` of restart number `restart`: "exit:1", "kill", "state:78:message",
"hang", "child". With "linger": 5 the interpreter takes five seconds to end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

from service.launch import state
from service.metrics.client import MetricsClient

stop = 0


def on_signal(number: int, frame: FrameType | None) -> None:
    """Remember the signal."""
    global stop
    stop = number


class Lingering:
    """Slow to be taken apart, after the interpreter has dropped its signal handlers."""

    def __init__(self, seconds: float, left: Path) -> None:
        self.seconds, self.left = seconds, str(left)

    # Modules may be gone when it runs.
    def __del__(self, sleep: Callable[[float], None] = time.sleep, mkdir: Callable[[str], None] = os.mkdir) -> None:
        sleep(self.seconds)
        mkdir(self.left)


def main() -> int:
    """Run the script; 0 finished, 75 stopped."""
    script = json.loads(os.environ.get("FAKE_SCRIPT", "{}"))
    if not script.get("deaf"):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, on_signal)
    rank, restart = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    local_rank = int(os.environ["LOCAL_RANK"])
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    if script.get("linger"):
        sys.modules["lingering"] = cast(Any, Lingering(script["linger"], run_dir / f"left-{rank}"))
    (run_dir / f"pid-{rank}").write_text(str(os.getpid()))
    with (run_dir / "starts").open("a") as file:
        file.write(f"{rank} {restart}\n")
    metrics = MetricsClient.from_env()
    for step in range(1, script.get("steps", 100) + 1):
        time.sleep(script.get("seconds", 0.05))
        metrics.observe("step_seconds", script.get("seconds", 0.05))
        metrics.add("samples_total", 4)
        metrics.set("step", step)
        metrics.set("loss", 1.0 / step)
        metrics.flush()
        if step == script.get("at", 3) and rank == script.get("rank", 0):
            happen(script.get("on", {}).get(restart, ""))
        if step == script.get("at", 3):
            (run_dir / f"step-{rank}").write_text(str(step))
        # One file stands for the all-reduce that makes the ranks agree, and that fails without one of them.
        if stop and not all(alive(run_dir / f"pid-{peer}") for peer in range(int(os.environ["WORLD_SIZE"]))):
            return 1
        if stop:
            (run_dir / f"signal-{rank}").write_text(signal.Signals(stop).name)
            (run_dir / "agree").touch()
        if (run_dir / "agree").exists():
            if local_rank == 0:
                state.report("stopped", step=step)
            return 75
    if local_rank == 0:
        state.report("finished", step=script.get("steps", 100))
    return 0


def alive(file: Path) -> bool:
    """True when the process whose id is in the file lives."""
    pid = file.read_text()
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def happen(what: str) -> None:
    """Do what the script says."""
    kind, _, rest = what.partition(":")
    if kind == "exit":
        os._exit(int(rest))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "state":
        code, _, reason = rest.partition(":")
        state.report("failed", reason=reason, exit_code=int(code), step=3)
        os._exit(int(code))
    if kind == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        time.sleep(600)
    if kind == "child":
        # A helper that leaves the worker's session and outlives it, as a compile server may.
        subprocess.Popen(["sleep", "600"], start_new_session=True)


if __name__ == "__main__":
    sys.exit(main())
