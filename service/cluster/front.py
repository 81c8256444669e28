"""torchx's Runner as the one front: submit, status, logs, list, cancel for all schedulers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, UserError

if TYPE_CHECKING:
    from service.cluster.job import Job

SESSION = "hiera-train"
SCHEDULERS = {
    "slurm": "hiera_slurm",
    "kubernetes": "hiera_kubernetes",
    "docker": "local_docker",
    "local": "local_cwd",
}
"""Names on our command line, and those that torchx's handles begin with."""
LOG_DIR = "logs/local"


def make_runner() -> Any:
    """A Runner with our schedulers and torchx's local one. Raises UserError without torchx."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchx.runner import Runner
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "torchx":
            raise
        raise UserError(
            "torchx is not installed: pip install 'torchx>=0.7,<0.9'; "
            "without it, pipe hiera-train render into sbatch or kubectl apply -f -"
        ) from None
    from torchx.schedulers import local_scheduler

    from service.cluster import torchx_docker, torchx_kubernetes, torchx_slurm

    factories = {
        torchx_slurm.NAME: torchx_slurm.create_scheduler,
        torchx_kubernetes.NAME: torchx_kubernetes.create_scheduler,
        torchx_docker.NAME: torchx_docker.create_scheduler,
        "local_cwd": local_scheduler.create_cwd_scheduler
        if hasattr(local_scheduler, "create_cwd_scheduler")
        else local_scheduler.create_scheduler,
    }
    return Runner(SESSION, factories)


def submit(job: Job, on: str, source: str, overrides: tuple[str, ...], *, dry_run: bool) -> int:
    """Submit a job, print its handle on stdout; local runs are watched to their end."""
    from service.cluster.app import make_app

    with make_runner() as runner:
        app = make_app(job, source, overrides)
        options: dict[str, Any] = {}
        if on == "local":
            if job.seeds or job.after:
                raise UserError("--seeds and --after: only Slurm has job arrays and dependencies")
            options["log_dir"] = str(Path(LOG_DIR).absolute())
        info = runner.dryrun(app, SCHEDULERS[on], cfg=options)
        if dry_run:
            print(str(info).rstrip("\n"))
            return EXIT_FINISHED
        handle = _schedule(runner, info, on)
        print(handle, flush=True)
        if on != "local":
            return EXIT_FINISHED
        return _watch(runner, handle, job)


def _watch(runner: Any, handle: str, job: Job) -> int:
    """Show a local run until it ends, since torchx's local processes end with the Runner; its exit code."""
    from torchx.schedulers.local_scheduler import SignalException

    try:
        for line in runner.log_lines(handle, "trainer", 0, should_tail=True):
            sys.stderr.write(line if line.endswith("\n") else line + "\n")
        status = runner.wait(handle, wait_interval=0.2)
    except SignalException as stopped:
        # The Runner asks its processes to stop when it is closed, and waits for them.
        print(f"hiera-train: stopping the run: {stopped.sigval.name}", file=sys.stderr)
        return EXIT_STOPPED
    return _exit_code(job) if status is None or status.state.name != "SUCCEEDED" else EXIT_FINISHED


def _schedule(runner: Any, info: Any, on: str) -> str:
    if on != "docker":
        return str(runner.schedule(info))
    try:
        return str(runner.schedule(info))
    except Exception as error:  # noqa: BLE001 - docker's client raises what it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"docker: {reason}", EXIT_FAILED) from None


def _exit_code(job: Job) -> int:
    """What the launcher said: torchx tells success and failure only."""
    from service.launch.state import read_state

    now = read_state(job.run_dir, 0)
    return now.exit_code if now is not None and now.exit_code else EXIT_FAILED


def status(handle: str) -> int:
    """Print the state of a job; exit code 0 unless it failed."""
    with make_runner() as runner:
        found = _status(runner, handle)
        print(f"{found.state.name}  {handle}")
        if found.msg and found.msg != "<NONE>":
            print(f"  {found.msg}")
        if found.num_restarts > 0:
            print(f"  restarts: {found.num_restarts}")
        return EXIT_FAILED if found.state.name == "FAILED" else EXIT_FINISHED


def _status(runner: Any, handle: str) -> Any:
    _check(handle)
    found = runner.status(handle)
    if found is None:
        raise UserError(f"{handle}: no such job")
    return found


def _check(handle: str) -> None:
    scheduler = handle.split("://", 1)[0]
    if "://" not in handle or scheduler not in SCHEDULERS.values():
        known = ", ".join(f"{name}://…" for name in SCHEDULERS.values())
        raise UserError(f"{handle!r} is not a handle that submit printed ({known})")
    if scheduler == SCHEDULERS["local"]:
        raise UserError(f"{handle}: a local run ends with its submit; see {LOG_DIR} and the run directory")


def logs(handle: str, node: int, *, follow: bool) -> int:
    """Print the log of a node; with follow until the job has ended."""
    with make_runner() as runner:
        _status(runner, handle)
        lines: Iterable[str] = runner.log_lines(handle, "trainer", node, should_tail=follow)
        for line in lines:
            sys.stdout.write(line)
            if follow:
                sys.stdout.flush()
    return EXIT_FINISHED


def list_jobs(on: str) -> int:
    """Print handle and state of the jobs of a scheduler."""
    with make_runner() as runner:
        for app in runner.list(SCHEDULERS[on]):
            print(f"{app.state.name:<10} {app.app_handle}")
    return EXIT_FINISHED


def cancel(handle: str) -> int:
    """Cancel a job; one that has ended stays as it is."""
    with make_runner() as runner:
        _status(runner, handle)
        runner.cancel(handle)
    return EXIT_FINISHED
