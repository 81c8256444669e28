"""Docker for torchx: torchx's own scheduler, given what a container of hiera-train needs of this machine.

Registered under torchx's name, local_docker. Apps of other components go through as they are.
"""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

from torchx.schedulers.docker_scheduler import DockerScheduler as TorchxDockerScheduler
from torchx.specs import AppDef, AppDryRunInfo, BindMount, Role

from service.cluster.app import METADATA, job_of
from service.cluster.job import Job
from service.errors import UserError

NAME = "local_docker"
GRACE_LABEL = "hiera-train.grace-seconds"
EXTRA_GRACE_SECONDS = 10
"""Beyond runtime.grace_seconds, after which the launcher kills what did not stop."""


class DockerScheduler(TorchxDockerScheduler):  # type: ignore[misc]  # torchx is optional
    """One node, with the configuration, the data and the run directory where they are on this machine."""

    def __init__(self, session_name: str) -> None:
        super().__init__(session_name)
        self._written: dict[str, list[Path]] = {}

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Any) -> None:
        """Nothing for ours: torchx would copy the current directory into a new image, which has it all already."""
        if METADATA not in role.metadata:
            super().build_workspace_and_update_role(role, workspace, cfg)

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[Any]:
        if not any(METADATA in role.metadata for role in app.roles):
            return super()._submit_dryrun(app, cfg)
        job = job_of(app)
        app = copy.deepcopy(app)
        prepare(app, job)
        info = super()._submit_dryrun(app, cfg)
        for container in info.request.containers:
            # Who submits owns the run directory, here and in the container.
            container.kwargs["user"] = f"{os.getuid()}:{os.getgid()}"
            grace = math.ceil(job.config.runtime.grace_seconds) + EXTRA_GRACE_SECONDS
            container.kwargs["labels"][GRACE_LABEL] = str(grace)
        self._written[info.request.app_id] = written(job)
        return info

    def schedule(self, dryrun_info: AppDryRunInfo[Any]) -> str:
        """Start the container; directories it writes to are made first, else Docker makes them as root."""
        for path in self._written.get(dryrun_info.request.app_id, []):
            path.mkdir(parents=True, exist_ok=True)
        return str(super().schedule(dryrun_info))

    def _cancel_existing(self, app_id: str) -> None:
        """Ask to save and stop; torchx leaves a container the engine's 10 s."""
        for container in self._get_containers(app_id):
            grace = container.labels.get(GRACE_LABEL)
            container.stop() if grace is None else container.stop(timeout=int(grace))


def prepare(app: AppDef, job: Job) -> None:
    """Change an AppDef of hiera-train's component into what the image's entry point takes.

    Raises UserError for several nodes, and for what only Slurm has.
    """
    if job.cluster.nodes > 1:
        raise UserError("--nodes: docker runs one node; use local, slurm or kubernetes for several")
    if job.seeds or job.after:
        raise UserError("--seeds and --after: only Slurm has job arrays and dependencies")
    role = app.roles[0]
    # torchx puts the entry point in front of the arguments, and the image has hiera-train as its own.
    role.entrypoint = role.args[0]
    role.args = role.args[1:]
    runs = written(job)[0]
    role.mounts = [BindMount(str(path), str(path), read_only=closed) for path, closed in mounts(role, job).items()]
    # The directory that relative paths start at is the image's own.
    run_dir = str(runs / job.run_dir.name).replace("$", "$$$$")
    role.args += ["--set", f"run.dir={run_dir}"]
    # torchx makes /dev/shm as large as the memory limit, and 64 MB without one, too little for NCCL.
    role.resource.memMB = _memory_megabytes()


def mounts(role: Role, job: Job) -> dict[Path, bool]:
    """Absolute paths of the configuration, the data and what is written, each once: engines refuse equal targets.

    The value: read-only. What is written to is writable, whatever else lies there.
    """
    config = Path(role.args[1].replace("$$", "$"))
    read = (config.parent, job.config.data.path, job.config.data.val_path, job.config.train.init_from)
    closed = {_plain(path): True for path in read if path is not None and path.is_absolute()}
    return closed | dict.fromkeys(written(job), False)


def written(job: Job) -> list[Path]:
    """Absolute directories that the container writes to: that of the run directories first."""
    caches = (job.config.runtime.cache_dir, job.config.runtime.cache_seed)
    runs = (Path.cwd() / job.run_dir).parent
    return [_plain(runs), *(_plain(path) for path in caches if path is not None and path.is_absolute())]


def _plain(path: Path) -> Path:
    """Without `..`, as engines compare targets."""
    return Path(os.path.normpath(path))


def _memory_megabytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    return 16384


def create_scheduler(session_name: str, **kwargs: object) -> DockerScheduler:
    """Entry point of torchx."""
    return DockerScheduler(session_name)
