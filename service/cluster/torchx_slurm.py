"""Slurm for torchx: sends what service.cluster.slurm renders.

torchx's own Slurm scheduler ignores image and mounts, cuts environment values at commas, and its status
needs accounting.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.specs import AppDef, AppDryRunInfo, AppState, Role, RoleStatus, is_terminal, runopts
from torchx.specs.api import ReplicaStatus

from service.cluster import slurm, slurm_client
from service.cluster.app import ROLE, job_of
from service.errors import UserError

NAME = "hiera_slurm"
OPTIONS = ("partition", "account", "qos", "time", "constraint", "exclude", "reservation", "mem")
"""Fields of cluster.slurm that torchx's -cfg may replace."""
POLL_SECONDS = 1.0

STATES: dict[str, AppState] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"), AppState.PENDING),
    **dict.fromkeys(("RESIZING", "SPECIAL_EXIT", "STOPPED"), AppState.PENDING),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT"), AppState.RUNNING),
    "COMPLETED": AppState.SUCCEEDED,
    **dict.fromkeys(("CANCELLED", "PREEMPTED", "REVOKED"), AppState.CANCELLED),
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"), AppState.FAILED),
    **dict.fromkeys(("BOOT_FAIL", "DEADLINE"), AppState.FAILED),
}


@dataclass
class Request:
    """What is handed to sbatch, and where the logs will be."""

    script: str
    logs: str

    def __str__(self) -> str:
        return self.script


class SlurmScheduler(Scheduler[Mapping[str, Any]]):  # type: ignore[misc]  # torchx is optional
    """Jobs by sbatch; an app's id is the job's, with _TASK for one task of an array."""

    def __init__(self, session_name: str) -> None:
        super().__init__(NAME, session_name)

    def _run_opts(self) -> runopts:
        opts = runopts()
        for name in OPTIONS:
            opts.add(name, type_=str, default=None, help=f"overrides cluster.slurm.{name}")
        return opts

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo[Request]:
        job = job_of(app, {name: cfg[name] for name in OPTIONS if cfg.get(name) is not None})
        directory = job.cluster.slurm.log_dir
        return AppDryRunInfo(Request(slurm.render(job), str(directory or slurm.LOG_DIR)), str)

    def schedule(self, dryrun_info: AppDryRunInfo[Request]) -> str:
        """Submit in the current directory; returns the job's id."""
        return slurm_client.submit(dryrun_info.request.script, dryrun_info.request.logs)

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """State of a job; None when neither Slurm nor its logs know it."""
        entries = slurm_client.find(app_id)
        if not entries:
            return None
        states = [STATES.get(entry.state, AppState.UNKNOWN) for entry in entries]
        messages = [_message(entry) for entry in entries]
        replicas = [
            ReplicaStatus(id=number, role=ROLE, state=state, hostname="") for number, state in enumerate(states)
        ]
        return DescribeAppResponse(
            app_id=app_id,
            state=_together(states),
            num_restarts=sum(entry.restarts for entry in entries),
            msg="; ".join(dict.fromkeys(messages)),
            roles=[Role(name=ROLE, image="")],
            roles_statuses=[RoleStatus(role=ROLE, replicas=replicas)],
        )

    def list(self, cfg: Mapping[str, Any] | None = None) -> list[ListAppResponse]:
        """This user's jobs that were submitted by hiera-train."""
        return [
            ListAppResponse(app_id=entry.job, state=STATES.get(entry.state, AppState.UNKNOWN))
            for entry in slurm_client.ours()
        ]

    def _cancel_existing(self, app_id: str) -> None:
        slurm_client.cancel(app_id)

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Lines of node k; with should_tail until the job has ended. stdout and stderr are one file."""
        if streams not in (None, Stream.COMBINED):
            raise ValueError("a node's stdout and stderr are one file; ask for combined")
        entries = slurm_client.find(app_id)
        if len(entries) > 1:
            raise UserError(f"{app_id} is an array; ask for one task, e.g. {entries[0].job}")
        if not entries or entries[0].logs is None:
            raise UserError(f"nobody knows where the logs of job {app_id} are")
        lines = self._lines(app_id, entries[0].logs / f"node-{k}.log", should_tail)
        return lines if regex is None else (line for line in lines if re.search(regex, line))

    def _lines(self, app_id: str, path: Path, follow: bool) -> Iterator[str]:
        position, rest, ended = 0, "", not follow
        while True:
            try:
                with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                    file.seek(position)
                    rest += file.read()
                    position = file.tell()
            except FileNotFoundError:
                if not follow:
                    raise UserError(f"no log yet at {path}; the job may not have started") from None
            *lines, rest = rest.split("\n")
            yield from (f"{line}\n" for line in lines)
            if ended:
                if rest:
                    yield rest
                return
            # The file is read once more after the end.
            entries = slurm_client.find(app_id)
            ended = not entries or is_terminal(STATES.get(entries[0].state, AppState.UNKNOWN))
            if not ended:
                time.sleep(POLL_SECONDS)


def _message(entry: slurm_client.Entry) -> str:
    text = entry.state
    if entry.reason not in ("", "None", "(null)"):
        text += f" ({entry.reason})"
    if entry.exit_code is not None and entry.state not in ("PENDING", "RUNNING"):
        text += f", exit code {entry.exit_code}"
    if entry.logs is not None:
        text += f", logs in {entry.logs}"
    return text


def _together(states: Iterable[AppState]) -> AppState:
    """State of an array: that of its tasks if it is one, else what is still to come, else the worst."""
    found = set(states)
    order = (AppState.RUNNING, AppState.PENDING, AppState.UNKNOWN, AppState.FAILED, AppState.CANCELLED)
    return next((state for state in order if state in found), AppState.SUCCEEDED)


def create_scheduler(session_name: str, **kwargs: object) -> SlurmScheduler:
    """Entry point of torchx."""
    return SlurmScheduler(session_name)
