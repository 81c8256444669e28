"""Processes of a run: none outlives its parent, none is missed when all must go (Linux only).

Two mechanisms, since each covers what the other cannot: the kernel kills torchrun and each worker when
its parent dies (PR_SET_PDEATHSIG), whatever killed the parent; and the launcher adopts
(PR_SET_CHILD_SUBREAPER), finds and kills whatever else was started below, compilers and loader processes
too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What asks a run to write a checkpoint and leave."""
LAUNCHER_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
"""What launcher and torchrun's agent take: the end of a terminal stops a run in good order too."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
PARENT_VARIABLE = "HIERA_PARENT"
"""Process id of the expected parent: the launcher's for torchrun, torchrun's for the workers."""


def _prctl(option: int, value: int) -> bool:
    try:
        return int(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies; leave at once when it is dead already.

    The signal is SIGKILL: nobody is left to enforce a grace period, and a checkpoint is whole or absent
    anyway. It is bound to the thread that made this process, so launcher and torchrun start theirs from
    the main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT_VARIABLE)
    if expected and expected != str(os.getppid()):
        os._exit(1)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose parents die; False when the kernel refuses."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def parents() -> dict[int, int]:
    """Parent of every live process; zombies are left out, since they only wait to be reaped."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The command in parentheses may itself hold spaces and parentheses.
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state not in "ZX":
            found[int(name)] = int(parent)
    return found


def children(pid: int) -> list[int]:
    """Live children of a process, from the kernel's list where it keeps one: this is asked twice a second."""
    try:
        found: set[int] = set()
        for task in os.listdir(f"/proc/{pid}/task"):
            found.update(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
        return sorted(child for child in found if is_live(child))
    except OSError:
        return sorted(child for child, parent in parents().items() if parent == pid)


def is_live(pid: int) -> bool:
    """False for a process that is gone or waits only to be reaped."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def descendants(pid: int, tree: dict[int, int] | None = None) -> set[int]:
    """Live descendants of a process."""
    tree = parents() if tree is None else tree
    below: dict[int, list[int]] = {}
    for child, parent in tree.items():
        below.setdefault(parent, []).append(child)
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in below.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def has_variable(pid: int, name: str, value: str) -> bool:
    """True when a process was started with name=value in its environment."""
    try:
        return f"{name}={value}".encode() in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def send(pid: int, number: int) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_marked(name: str, value: str, timeout: float = 10.0) -> list[int]:
    """Kill all descendants of this process that carry name=value, adopted ones too; returns those that stay.

    The mark keeps other children of this process out of it (the launcher may be called as a library).
    Killing goes on until none is left or `timeout` seconds have passed: a process in uninterruptible
    sleep (a GPU that hangs) cannot be killed.
    """
    me = os.getpid()
    deadline = time.monotonic() + timeout
    while True:
        tree = parents()
        marked = sorted(pid for pid in descendants(me, tree) if has_variable(pid, name, value))
        for pid in marked:
            send(pid, signal.SIGKILL)
        for pid in marked:
            # Adopted children would stay zombies for as long as the launcher lives.
            if tree.get(pid) == me:
                reap(pid)
        if not marked or time.monotonic() >= deadline:
            return marked
        time.sleep(0.02)


def reap(pid: int) -> None:
    """Collect a dead child; does nothing when it lives or is not ours."""
    with contextlib.suppress(OSError):
        os.waitpid(pid, os.WNOHANG)


def reap_adopted(keep: set[int]) -> None:
    """Collect dead children other than `keep`, whose exit status belongs to somebody."""
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid in keep:
            return
        reap(dead.si_pid)
