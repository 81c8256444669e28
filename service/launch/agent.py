"""torchrun in a process of ours: `python -m service.launch.agent TORCHRUN_ARGUMENTS...`.

The same agent as `python -m torch.distributed.run`, with three differences that its flags do not give: it
dies with the launcher; a stop signal is handed to the workers and otherwise ignored, as often as it comes
(torchrun's own handler raises out of whatever it does: a second signal cuts the wait for the workers
short, and a third leaves them orphaned); and instead of its tracebacks it prints one line for each worker
that died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from service import streams
from service.launch import processes, state
from service.launch.worker import STOP_FILE_VARIABLE

EXIT_WORKERS_FAILED = 3
"""Workers failed and torchrun's restarts are used up, or torch cannot be imported."""
EXIT_AGENT_FAILED = 4
"""torchrun itself failed: rendezvous lost, a port, the store."""
SHUTDOWN_TIMEOUT = "--shutdown-timeout"


def forward_signals() -> None:
    """Wait for stop signals for ever, and forward each."""
    while True:
        forward(signal.sigwait(processes.LAUNCHER_SIGNALS))


def forward(number: int) -> None:
    """Hand a stop signal to the workers and note it; torchrun then ends when they have left."""
    stop = os.environ.get(STOP_FILE_VARIABLE)
    if stop:
        with contextlib.suppress(OSError):
            Path(stop).touch()
    # SIGHUP has no meaning for workers.
    for pid in processes.children(os.getpid()):
        processes.send(pid, signal.SIGTERM if number == signal.SIGHUP else number)


class OneLineFailures(logging.Handler):
    """Turns the agent's report of a dead worker into one line; silent when the workers wrote why they
    ended.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line for records of the form (exit code, local rank, pid, …); drop all others."""
        args = record.args
        if record.levelno < logging.ERROR or not isinstance(args, tuple) or len(args) < 3:
            return
        code, local_rank, pid = args[:3]
        if not all(isinstance(value, int) for value in (code, local_rank, pid)) or outcome_known():
            return
        streams.say(f"hiera-train: worker {local_rank} (pid {pid}) {describe_exit(int(str(code)))}")


def outcome_known() -> bool:
    """True when the workers of this attempt have written a final state."""
    run_dir = os.environ.get(state.RUN_DIR_VARIABLE)
    if not run_dir:
        return False
    now = state.read_state(Path(run_dir), int(os.environ.get(state.NODE_RANK_VARIABLE, "0")))
    return now is not None and now.attempt == os.environ.get(state.ATTEMPT_VARIABLE) and now.is_final


def describe_exit(code: int) -> str:
    """`was killed by SIGKILL` for -9, `failed with exit code 1` for 1."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def torchrun_arguments(arguments: list[str]) -> list[str]:
    """The arguments this torch's torchrun takes: before 2.12 it has no --shutdown-timeout.

    There the workers' time between SIGTERM and SIGKILL, 30 s, is changed where it is used.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import PContext

    given = [argument for argument in arguments if argument.startswith(SHUTDOWN_TIMEOUT)]
    # the help of an argparse parser is the only public list of what it takes
    if not given or SHUTDOWN_TIMEOUT in torchrun.get_args_parser().format_help():
        return arguments
    seconds = int(given[0].removeprefix(f"{SHUTDOWN_TIMEOUT}="))
    close = PContext.close

    def patient_close(self: PContext, death_sig: signal.Signals | None = None, timeout: int = seconds) -> None:
        close(self, death_sig, timeout)

    PContext.close = patient_close  # type: ignore[method-assign]
    return [argument for argument in arguments if argument not in given]


def main() -> int:
    """Run torchrun's agent until its workers have ended; see the exit codes above."""
    processes.die_with_parent()
    # Blocked, not handled: the workers inherit that, so that no signal can end one before it has its handlers.
    # One thread takes what arrives.
    signal.pthread_sigmask(signal.SIG_BLOCK, processes.LAUNCHER_SIGNALS)
    threading.Thread(target=forward_signals, name="signals", daemon=True).start()
    # From here on for the workers.
    os.environ[processes.PARENT_VARIABLE] = str(os.getpid())
    debug = bool(os.environ.get("HIERA_DEBUG"))
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except (ImportError, OSError, MemoryError) as error:
        state.report("failed", reason=f"torch cannot be imported on this machine: {first_line(error)}")
        return EXIT_WORKERS_FAILED

    if not debug:
        logger = logging.getLogger("torch.distributed")
        logger.handlers[:] = [OneLineFailures()]
        logger.propagate = False
        logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    # What main() was sent while torch was imported.
    stop = os.environ.get(STOP_FILE_VARIABLE)
    if stop and os.path.exists(stop):
        return 0
    try:
        torchrun.run(torchrun.parse_args(torchrun_arguments(sys.argv[1:])))  # type: ignore[no-untyped-call]
    except ChildFailedError:
        return EXIT_WORKERS_FAILED
    except Exception as error:  # noqa: BLE001 - whatever torchrun raises ends in one line and an exit code
        if debug:
            traceback.print_exc()
        cause = error.__cause__ or error
        streams.say(f"hiera-train: torchrun: {type(error).__name__}: {first_line(cause)}")
        return EXIT_AGENT_FAILED
    return 0


def first_line(error: BaseException) -> str:
    """First line of an exception's message, its type when it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    # Not sys.exit: what torch does at interpreter exit may hang on a store whose server is gone.
    code = main()
    streams.settle()
    os._exit(code)
