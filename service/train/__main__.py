"""Entry point of a worker: `python -m service.train --run-dir DIR`, as the launcher has torchrun start it.

What the run came to goes to the node's state file, because torchrun loses exit codes; a user's error goes
there too, and the launcher prints it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

from service import streams
from service.train.signals import StopRequest


def main() -> int:
    """Runs this rank; returns its exit code."""
    started = float(os.environ.get("HIERA_STARTED", time.time()))
    stop = StopRequest()
    stop.install()
    parser = argparse.ArgumentParser(prog="python -m service.train", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with the run.yaml")
    run_dir = parser.parse_args().run_dir

    # Imports that take seconds come after the handlers: a signal during them must not kill the worker.
    from service.config.load import load_config
    from service.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, UserError
    from service.launch import state
    from service.metrics.client import MetricsClient

    metrics = MetricsClient.from_env()

    def fail(reason: str, code: int) -> bool:
        last = state.read_state(run_dir, int(os.environ.get(state.NODE_RANK_VARIABLE, "0")))
        step = last.step if last is not None else 0
        return state.report("failed", step=step, reason=reason, exit_code=code)

    try:
        from service.train.loop import train
        from service.train.workers import leave_workers

        outcome = train(load_config(run_dir / "run.yaml"), run_dir, stop, metrics, started)
        metrics.close()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            state.report(outcome.status, step=outcome.step, reason=outcome.reason)
        leave_workers()
        return EXIT_FINISHED if outcome.status == "finished" else EXIT_STOPPED
    except UserError as error:
        reason, code = str(error), error.exit_code
        if not fail(reason, code) and state.ATTEMPT_VARIABLE not in os.environ:
            streams.say(f"hiera-train: error: {reason}")
    except Exception as error:  # noqa: BLE001 (the boundary of the process)
        code = EXIT_FAILED
        first_line = (str(error).splitlines() or [""])[0]
        reason = f"rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {first_line}"
        # When the outcome is already known, this is its echo: a peer that left tore the connection down.
        if fail(reason, code) or state.ATTEMPT_VARIABLE not in os.environ:
            streams.say(traceback.format_exc().rstrip())
    metrics.close()
    streams.settle()
    # Not through the interpreter's shutdown: it would wait for collectives that peers never join.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
