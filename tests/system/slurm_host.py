"""What a pretended cluster needs of this machine, and the removal of what one has left on it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "ip", "nsenter", "unshare", "setpriv")
PREFIX = "hl"
"""Start of the names of our bridges and network namespaces."""
DEADLINE = 600.0
"""Seconds that a wait takes at most. Waits end with what they wait for; a deadline is for what never comes."""


def missing_programs() -> list[str]:
    """What of the needed programs is not installed; "root" when this user is not root."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return missing if os.geteuid() == 0 else ["root", *missing]


needs_slurm = pytest.mark.skipif(bool(missing_programs()), reason=f"needs {', '.join(missing_programs())}")


def wait_for(condition: Callable[[], Any], what: str = "", interval: float = 0.2) -> Any:
    """Value of `condition` as soon as it is true; AssertionError after DEADLINE."""
    deadline = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE:g} s in vain {what}"
        time.sleep(interval)
    return value


def completed(command: Sequence[str], directory: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command run to its end in a directory."""
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def end(process: subprocess.Popen[Any], seconds: float = DEADLINE) -> None:
    """Ask a process to end and wait for it; it is killed where the wait fails, and outlives no test."""
    process.terminate()
    try:
        process.wait(seconds)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


# What a cluster of namespaces asks of the kernel, each as a command that changes nothing for long.
_KERNEL = (
    ("network namespaces", "ip netns add $T && ip netns exec $T ip link set lo up"),
    ("bridges", "ip link add $T type bridge"),
    ("veth pairs", "ip link add ${T}v type veth peer name eth0 netns $T && ip link set ${T}v master $T"),
    ("namespaces of names, processes and mounts", "unshare --uts --ipc --mount --pid --fork --mount-proc true"),
    ("mounts", "unshare --mount sh -c 'mount --make-rprivate / && mount -t tmpfs x /dev/shm'"),
    ("device files", "mknod $D/null c 1 3"),
)


def missing_here() -> str:
    """What of this machine's programs, rights or kernel is missing, in one line; empty when nothing is."""
    if os.geteuid():
        return "it takes root"
    if programs := missing_programs():
        return f"missing: {', '.join(programs)} (Debian: slurmctld slurmd slurm-client munge iproute2 util-linux)"
    token = f"{PREFIX}t{secrets.token_hex(2)}"
    problem = ""
    with tempfile.TemporaryDirectory() as directory:
        for name, command in _KERNEL:
            environment = {**os.environ, "T": token, "D": directory}
            done = subprocess.run(
                ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
            )
            if done.returncode:
                said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                problem = f"the kernel or the container does not allow {name}: {said}"
                break
    for undo in (["ip", "link", "del", token], ["ip", "netns", "del", token]):
        subprocess.run(undo, capture_output=True, check=False)
    return problem


def sweep() -> None:
    """Remove networks of clusters whose process has been killed; their daemons have died with it."""
    links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True).stdout or "[]")
    for link in links:
        owner = re.fullmatch(r"slurm-lab of (\d+)", link.get("ifalias", ""))
        if owner is not None and not Path("/proc", owner.group(1)).exists():
            remove_network(link["ifname"])


def remove_network(bridge: str) -> None:
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for space in re.findall(rf"^({re.escape(bridge)}-\S+)", spaces, re.MULTILINE):
        # Its end of a cable takes the other one along.
        subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
    links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=False).stdout or "[]")
    for link in links:
        if link["ifname"].startswith(f"{bridge}v"):
            subprocess.run(["ip", "link", "del", link["ifname"]], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def closed_directory() -> str:
    """The interpreter's directory if it lies in a home that others may not enter, else an empty text."""
    base = Path(sys.base_prefix).resolve()
    home = Path("/", *base.parts[1:2])
    if home.stat().st_mode & 0o005 == 0o005:
        return ""
    return str(Path("/", *base.parts[1:3]))
