"""Containers of the real image under podman, for the tests: started, watched, stopped, and never left behind.

The image is what docker/build.sh made; HIERA_IMAGE names another one.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

IMAGE = os.environ.get("HIERA_IMAGE", "localhost/hiera-train:latest")
# runc: Debian's crun fails without systemd. Limits are named, since podman's defaults exceed what root has here.
PODMAN = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs")
LABEL = f"hiera-test={uuid.uuid4().hex}"
"""On all that this process starts, so that `sweep` finds it."""
SHORT = ("--set", "train.steps=40", "--set", "train.eval_every=0", "--set", "checkpoint.every_steps=20")
"""Arguments that cut the quick start to seconds; its warm-up takes 30 steps."""

HARDENED = (
    *("--user", "54321:54321"),
    "--read-only",
    "--cap-drop=all",
    *("--security-opt", "no-new-privileges"),
    *("--tmpfs", "/tmp:rw,noexec,nosuid,size=256m"),
    *("--shm-size", "64m"),
)
"""What a careful cluster gives a container."""

_work: list[str] = []


def work_directory() -> str:
    """Where podman is run: conmon leaves a file `oom` there when a container hits its memory limit."""
    if not _work:
        _work.append(tempfile.mkdtemp(prefix="hiera-podman-"))
        atexit.register(shutil.rmtree, _work[0], ignore_errors=True)
    return _work[0]


def podman(*arguments: str, check: bool = True, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run podman with further arguments."""
    answer = subprocess.run(
        [*PODMAN, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=work_directory(),
    )
    assert not check or answer.returncode == 0, f"podman {' '.join(arguments)}: {answer.stderr}"
    return answer


def sweep() -> None:
    """Remove the containers that a test of this process has left, after a time limit say."""
    left = podman("ps", "--all", "--quiet", "--filter", f"label={LABEL}").stdout.split()
    if left:
        podman("rm", "--force", "--ignore", "--time", "0", *left)


def limits() -> list[str]:
    """Options for the limits on files and processes."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
    processes = most if processes in (-1, resource.RLIM_INFINITY) else min(processes, most)
    return [f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={processes}:{processes}"]


def run_arguments(*options: str) -> list[str]:
    """Arguments of `podman run` up to the image."""
    # Health checks are run by hand: podman leaves their timing to systemd.
    return ["run", "--pull=never", f"--label={LABEL}", *limits(), *options, IMAGE]


def run(*arguments: str, options: Sequence[str] = (), timeout: float = 2400) -> subprocess.CompletedProcess[str]:
    """Run the image to its end; stdout and stderr are the container's."""
    name = f"hiera-test-{uuid.uuid4().hex[:10]}"
    try:
        start = run_arguments("--rm", "--no-healthcheck", "--name", name, *options)
        return podman(*start, *arguments, check=False, timeout=timeout)
    finally:
        podman("rm", "--force", "--ignore", "--time", "0", name)


def python(code: str, options: Sequence[str] = (), timeout: float = 2400) -> subprocess.CompletedProcess[str]:
    """Run Python code in the image."""
    return run("-c", code, options=["--entrypoint", "python", *options], timeout=timeout)


def wait_for(condition: Callable[[], Any], seconds: float = 900.0, what: str = "") -> Any:
    """Value of `condition` as soon as it is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain {what}"
        time.sleep(0.2)
    return value


class Container:
    """A container in the background, a context manager that removes it."""

    def __init__(self, *arguments: str, options: Sequence[str] = ()) -> None:
        self.name = f"hiera-test-{uuid.uuid4().hex[:10]}"
        podman(*run_arguments("--detach", "--name", self.name, *options), *arguments)

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        podman("rm", "--force", "--ignore", "--time", "0", self.name)

    def logs(self) -> str:
        """stdout and stderr so far."""
        answer = podman("logs", self.name)
        return answer.stdout + answer.stderr

    def state(self) -> dict[str, Any]:
        """podman's `State` of the container."""
        state: dict[str, Any] = json.loads(podman("inspect", self.name).stdout)[0]["State"]
        return state

    def wait_for_log(self, text: str, seconds: float = 900.0) -> None:
        """Wait until the output holds `text`; fails when the container ends before."""

        def seen() -> bool:
            logs = self.logs()
            assert text in logs or self.state()["Running"], logs
            return text in logs

        wait_for(seen, seconds, f"for {text!r}")

    def wait(self, seconds: float = 2400.0) -> int:
        """Exit code, once the container has ended."""
        return int(podman("wait", self.name, timeout=seconds).stdout.strip())

    def stop(self, seconds: int = 300) -> int:
        """What `docker stop` does; returns the exit code."""
        podman("stop", "--time", str(seconds), self.name, timeout=seconds + 60)
        return int(self.state()["ExitCode"])

    def execute(self, *command: str, check: bool = True) -> str:
        """stdout of a command inside."""
        return podman("exec", self.name, *command, check=check).stdout

    def call(self, *command: str) -> tuple[int, str]:
        """Exit code and stderr of a command inside."""
        answer = podman("exec", self.name, *command, check=False)
        return answer.returncode, answer.stderr

    def processes(self) -> list[tuple[int, str, str]]:
        """(pid, state, command line) of every process inside but the one that looks."""
        code = (
            "import os\n"
            "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
            "    if int(pid) == os.getpid(): continue\n"
            "    try:\n"
            "        state = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0]\n"
            "        line = open(f'/proc/{pid}/cmdline').read().replace(chr(0), ' ')\n"
            "    except OSError: continue\n"
            "    print(pid, state, line)\n"
        )
        rows = [line.split(" ", 2) for line in self.execute("/usr/bin/python3", "-I", "-c", code).splitlines()]
        return [(int(pid), state, line) for pid, state, line in rows]


class Volumes:
    """Named volumes of one test, removed after it."""

    def __init__(self) -> None:
        self._prefix = f"hiera-test-{uuid.uuid4().hex[:10]}"
        self._names: set[str] = set()

    def __call__(self, place: str) -> str:
        """Option for `podman run`: a volume at `place`, the same one each time."""
        name = f"{self._prefix}-{place.strip('/').replace('/', '-')}"
        self._names.add(name)
        return f"--volume={name}:{place}"

    def path(self, place: str) -> Path:
        """Where the volume lies on this machine."""
        name = f"{self._prefix}-{place.strip('/').replace('/', '-')}"
        return Path(podman("volume", "inspect", "--format", "{{.Mountpoint}}", name).stdout.strip())

    def remove(self) -> None:
        """Remove all of them."""
        for name in self._names:
            podman("volume", "rm", "--force", name)
