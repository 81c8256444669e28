"""What torchrun starts for each rank: safety first, then the training module in this same process.

`python -m service.launch.worker MODULE ARGS...` makes the process die with torchrun, binds it to its
cores, tells the launcher that workers started, waits out the back-off after a failure, and runs MODULE as
__main__.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from service.errors import EXIT_STOPPED
from service.launch import numa, processes, rundir, state
from service.metrics.client import MetricsClient
from service.metrics.health import LAUNCHED

STOP_FILE_VARIABLE = "HIERA_STOP_FILE"
NNODES_VARIABLE = "HIERA_NNODES"
STARTED_VARIABLE = "HIERA_STARTED"
"""Unix time at which this start began, for time_to_first_step_seconds."""
MAX_BACKOFF_SECONDS = 30.0


def main() -> None:
    """Run the module named by the first argument as torchrun's worker."""
    processes.die_with_parent()
    # A signal that arrives before the training module has its handlers must neither kill this rank alone nor
    # be lost: it is only noted here, and the launcher sends it to all workers until they have left. The agent
    # started this process with the signals blocked.
    for number in processes.STOP_SIGNALS:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*processes.STOP_SIGNALS, signal.SIGHUP))
    run_dir = Path(os.environ[state.RUN_DIR_VARIABLE])
    node_rank = int(os.environ.get(state.NODE_RANK_VARIABLE, "0"))
    local_rank = int(os.environ["LOCAL_RANK"])
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if is_over(run_dir, node_rank, stop_file=restarts > 0):
        return
    # Kept until the process ends; see service.launch.rundir.locked.
    rundir.hold_worker_lock(run_dir, int(os.environ.get(NNODES_VARIABLE, "1")), node_rank)
    numa.bind_numa(local_rank)
    if local_rank == 0:
        # The failure that made torchrun start its workers again is no longer what this node is at.
        before = state.read_state(run_dir, node_rank)
        state.report("running", step=before.step if before is not None else 0)
        client = MetricsClient.from_env()
        client.phase(LAUNCHED)
        client.close()
    if restarts:
        # Time to the first step is of this start, not of the run's whole history.
        os.environ[STARTED_VARIABLE] = repr(time.time())
    wait_backoff(restarts)
    if is_over(run_dir, node_rank, stop_file=restarts > 0):
        return
    module = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leave:
        # All ranks stop together after a checkpoint, so torchrun has nothing to tear down or to start again.
        if leave.code == EXIT_STOPPED and is_over(run_dir, node_rank):
            raise SystemExit(0) from None
        raise
    finally:
        # The interpreter drops handlers, but not this, before it takes its modules apart, which takes seconds
        # on a busy machine: a signal sent again would kill a worker that has all behind it.
        for number in processes.STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def is_over(run_dir: Path, node_rank: int, *, stop_file: bool = False) -> bool:
    """True when the run of this attempt has its outcome or, with `stop_file`, when a stop was asked for.

    torchrun starts its workers again after any non-zero exit, whatever it meant; this is what stops it. When
    they start for the first time, a stop is no reason to leave: a rank that started a moment earlier would
    wait for this one in vain. The ranks agree on it before their first step.
    """
    now = state.read_state(run_dir, node_rank)
    if now is not None and now.attempt == os.environ.get(state.ATTEMPT_VARIABLE) and now.is_final:
        return True
    stop = os.environ.get(STOP_FILE_VARIABLE)
    return stop_file and bool(stop) and os.path.exists(stop or "")


def wait_backoff(restarts: int) -> None:
    """Wait 1, 2, 4, … at most 30 s before the 1st, 2nd, 3rd, … restart; ends early when a stop is asked
    for.
    """
    if restarts <= 0:
        return
    deadline = time.monotonic() + min(MAX_BACKOFF_SECONDS, 2.0 ** (restarts - 1))
    stop = os.environ.get(STOP_FILE_VARIABLE, "")
    while time.monotonic() < deadline and not os.path.exists(stop):
        time.sleep(0.1)


def _note(number: int, frame: FrameType | None) -> None:
    stop = os.environ.get(STOP_FILE_VARIABLE)
    if stop:
        with contextlib.suppress(OSError):
            Path(stop).touch()


if __name__ == "__main__":
    main()
