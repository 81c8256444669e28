"""Kubernetes for torchx: creates what service.cluster.kubernetes renders.

torchx's own Kubernetes scheduler needs the Volcano operator, and what it restarts has lost its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.specs import AppDef, AppDryRunInfo, AppState, Role, RoleStatus, runopts
from torchx.specs.api import ReplicaStatus

from service.cluster import kubernetes
from service.cluster.app import ROLE, job_of
from service.cluster.job import Job
from service.cluster.kubernetes_client import Client, Entry

NAME = "hiera_kubernetes"
_PHASES = {
    "Pending": AppState.PENDING,
    "Running": AppState.RUNNING,
    "Succeeded": AppState.SUCCEEDED,
    "Failed": AppState.FAILED,
}


class KubernetesScheduler(Scheduler[Mapping[str, Any]]):  # type: ignore[misc]  # torchx is optional
    """Indexed Jobs; an app's id is namespace:name."""

    def __init__(self, session_name: str) -> None:
        super().__init__(NAME, session_name)
        self._connected: Client | None = None

    @property
    def _client(self) -> Client:
        """Connected when it is first needed: a dry run needs no cluster."""
        if self._connected is None:
            self._connected = Client()
        return self._connected

    def _run_opts(self) -> runopts:
        return runopts()

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo[Job]:
        job = job_of(app)
        kubernetes.manifests(job)
        return AppDryRunInfo(job, kubernetes.render)

    def schedule(self, dryrun_info: AppDryRunInfo[Job]) -> str:
        """Create the objects; returns namespace:name."""
        return self._client.submit(dryrun_info.request)

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """State of a Job and its pods; None when it is not there."""
        entry = self._client.find(app_id)
        if entry is None:
            return None
        replicas = [
            ReplicaStatus(id=pod.index, role=ROLE, state=_PHASES.get(pod.phase, AppState.UNKNOWN), hostname=pod.node)
            for pod in {pod.index: pod for pod in entry.pods}.values()
        ]
        return DescribeAppResponse(
            app_id=app_id,
            state=_state(entry),
            num_restarts=entry.failed,
            msg=_message(entry),
            roles=[Role(name=ROLE, image="", num_replicas=entry.nodes)],
            roles_statuses=[RoleStatus(role=ROLE, replicas=replicas)],
        )

    def list(self, cfg: Mapping[str, Any] | None = None) -> list[ListAppResponse]:
        """The Jobs of hiera-train in the current namespace."""
        return [ListAppResponse(app_id=entry.app_id, state=_state(entry)) for entry in self._client.ours()]

    def _cancel_existing(self, app_id: str) -> None:
        self._client.delete(app_id)

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
        """Lines of the newest pod of node k; with should_tail until it ends."""
        if streams not in (None, Stream.COMBINED):
            raise ValueError("a pod's stdout and stderr are one log; ask for combined")
        lines = self._client.log_lines(app_id, k, should_tail)
        return lines if regex is None else (line for line in lines if re.search(regex, line))


def _state(entry: Entry) -> AppState:
    if entry.condition in ("Complete", "Failed"):
        return AppState.SUCCEEDED if entry.condition == "Complete" else AppState.FAILED
    if entry.condition == "Suspended":
        return AppState.PENDING
    phases = [pod.phase for pod in entry.pods]
    if entry.pods:
        return AppState.RUNNING if "Running" in phases else AppState.PENDING
    return AppState.RUNNING if entry.active else AppState.PENDING


def _message(entry: Entry) -> str:
    parts = [" ".join(filter(None, (entry.condition, entry.message)))] if entry.condition else []
    for pod in {pod.index: pod for pod in entry.pods}.values():
        ended = "" if pod.exit_code is None else f", exit code {pod.exit_code}"
        reason = f" ({pod.reason})" if pod.reason else ""
        parts.append(f"pod {pod.index} {pod.phase}{ended}{reason}")
    return "; ".join(parts)


def create_scheduler(session_name: str, **kwargs: object) -> KubernetesScheduler:
    """Entry point of torchx."""
    return KubernetesScheduler(session_name)
