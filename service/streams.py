"""Standard input, output and error as they come: closed by cron or a daemon, on a full disk, piped into `head`.

None of that may end a run: what cannot be shown is lost, and training goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys


def open_standard_files() -> None:
    """Open /dev/null in the place of each of the descriptors 0, 1 and 2 that is closed.

    Otherwise the next file or socket that is opened gets the number, here or in a child, and what a library
    writes to its standard error goes into a lock file or a connection.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is given out, and those below are open already.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def say(line: str) -> None:
    """A line for the user on standard error; lost when that takes no more."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def settle() -> None:
    """Flush standard output and error; what they refuse is dropped, or the interpreter would exit with 120."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
