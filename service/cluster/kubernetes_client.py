"""Talking to a Kubernetes cluster by the official client: create a job's objects, ask, read logs, delete.

An app is `namespace:name`. The Job owns what was made for it, so deleting it deletes all but the claims.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from service.cluster import kubernetes as manifests
from service.cluster.job import Job
from service.errors import EXIT_FAILED, UserError

TIMEOUT_SECONDS = 30
SELECTOR = f"app.kubernetes.io/name={manifests.APP}"
ENDED = ("Complete", "Failed")


@dataclass(frozen=True)
class Pod:
    """A pod of a job: its completion index, phase, node and, once it has ended, exit code."""

    name: str
    index: int
    phase: str
    node: str
    exit_code: int | None
    reason: str


@dataclass(frozen=True)
class Entry:
    """A Job: `condition` is Complete, Failed, Suspended or empty; `pods` newest last for each index."""

    app_id: str
    condition: str
    message: str
    active: int
    failed: int
    nodes: int
    pods: tuple[Pod, ...] = ()


class Client:
    """The API of the current context of the kubeconfig, or of the cluster that this process runs in."""

    def __init__(self) -> None:
        try:
            from kubernetes import client, config
        except ModuleNotFoundError:
            raise UserError("the kubernetes client is not installed: pip install kubernetes") from None
        self._exception = client.ApiException
        self._transport_error = client.rest.urllib3.exceptions.HTTPError
        try:
            config.load_kube_config()
            _, active = config.list_kube_config_contexts()
            self.namespace = str(active["context"].get("namespace") or "default")
        except config.ConfigException as error:
            try:
                config.load_incluster_config()
                self.namespace = "default"
            except config.ConfigException:
                raise UserError(f"no Kubernetes cluster: {str(error).splitlines()[0]}; set KUBECONFIG") from None
        settings = client.Configuration.get_default_copy()
        settings.retries = False
        self._api = client.ApiClient(settings)
        self._batch, self._core = client.BatchV1Api(self._api), client.CoreV1Api(self._api)
        self._custom = client.CustomObjectsApi(self._api)

    def _call(self, method: Any, *arguments: Any, missing: Any = None, **options: Any) -> Any:
        """Call the API; `missing` for 404. Raises UserError with the server's own reason in one line."""
        try:
            return method(*arguments, _request_timeout=TIMEOUT_SECONDS, **options)
        except self._exception as error:
            if error.status == 404 and missing is not None:
                return missing
            raise UserError(f"Kubernetes: {_reason(error)}", EXIT_FAILED) from None
        except self._transport_error as error:
            host = self._api.configuration.host
            problem = str(getattr(error, "reason", None) or error).splitlines()[0]
            raise UserError(f"Kubernetes: {host} cannot be reached: {problem}", EXIT_FAILED) from None

    def submit(self, job: Job) -> str:
        """Create all objects; returns the app's id. Raises UserError when a Job of this name is there."""
        objects = manifests.manifests(job)
        namespace = job.cluster.kubernetes.namespace or self.namespace
        app_id = f"{namespace}:{manifests.object_name(job.name)}"
        if self.find(app_id) is not None:
            raise UserError(
                f"a Job {app_id} is there already; cancel it, which keeps the run's checkpoints, or give --name"
            )
        claims = [o for o in objects if o["kind"] == "PersistentVolumeClaim"]
        (main,) = (o for o in objects if o["kind"] == "Job")
        rest = [o for o in objects if o["kind"] not in ("PersistentVolumeClaim", "Job")]
        for claim in claims:
            if self._read_claim(claim["metadata"]["name"], namespace) is None:
                self._call(self._core.create_namespaced_persistent_volume_claim, namespace, claim)
        created = self._call(self._batch.create_namespaced_job, namespace, main)
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": created.metadata.name,
            "uid": created.metadata.uid,
            "controller": True,
        }
        try:
            for other in rest:
                metadata = {**other["metadata"], "ownerReferences": [owner]}
                self._create(namespace, {**other, "metadata": metadata})
        except UserError:
            self.delete(app_id)
            raise
        return app_id

    def _read_claim(self, name: str, namespace: str) -> Any:
        absent = object()
        read = self._core.read_namespaced_persistent_volume_claim
        found = self._call(read, name, namespace, missing=absent)
        return None if found is absent else found

    def _create(self, namespace: str, manifest: manifests.Manifest) -> None:
        kind = manifest["kind"]
        if kind == "ConfigMap":
            self._call(self._core.create_namespaced_config_map, namespace, manifest)
        elif kind == "Service":
            self._call(self._core.create_namespaced_service, namespace, manifest)
        else:
            group, version = manifest["apiVersion"].split("/")
            create = self._custom.create_namespaced_custom_object
            self._call(create, group, version, namespace, "podmonitors", manifest)

    def find(self, app_id: str) -> Entry | None:
        """A Job and its pods; None when it is not there."""
        namespace, name = self.parse(app_id)
        absent = object()
        found = self._call(self._batch.read_namespaced_job, name, namespace, missing=absent)
        if found is absent:
            return None
        return _entry(found, self._pods(namespace, name))

    def _pods(self, namespace: str, name: str) -> tuple[Pod, ...]:
        selector = f"{SELECTOR},app.kubernetes.io/instance={name}"
        listed = self._call(self._core.list_namespaced_pod, namespace, label_selector=selector)
        pods = sorted(listed.items, key=lambda pod: str(pod.metadata.creation_timestamp))
        return tuple(_pod(pod) for pod in pods)

    def ours(self) -> list[Entry]:
        """All Jobs of hiera-train in the current namespace."""
        listed = self._call(self._batch.list_namespaced_job, self.namespace, label_selector=SELECTOR)
        return [_entry(job, ()) for job in listed.items]

    def delete(self, app_id: str) -> None:
        """Delete a Job and, through the garbage collector, its pods and objects; pods save before they end."""
        namespace, name = self.parse(app_id)
        self._call(
            self._batch.delete_namespaced_job,
            name,
            namespace,
            propagation_policy="Foreground",
            missing=object(),
        )

    def log_lines(self, app_id: str, index: int, follow: bool) -> Iterator[str]:
        """Log lines of the newest pod of a completion index; with follow until it ends."""
        entry = self.find(app_id)
        pods = [pod for pod in entry.pods if pod.index == index] if entry is not None else []
        if not pods:
            raise UserError(f"{app_id} has no pod {index} yet, or not any more")
        namespace, _ = self.parse(app_id)
        read = self._core.read_namespaced_pod_log
        response = self._call(
            read, pods[-1].name, namespace, container=manifests.CONTAINER, follow=follow, _preload_content=False
        )
        rest = b""
        try:
            for chunk in response.stream(decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace") + "\n"
            if rest:
                yield rest.decode(errors="replace")
        finally:
            response.release_conn()

    def parse(self, app_id: str) -> tuple[str, str]:
        """Namespace and name of an app's id; a name alone is of the current namespace."""
        namespace, colon, name = app_id.rpartition(":")
        return (namespace if colon else self.namespace), name


def _reason(error: Any) -> str:
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason or f"HTTP {error.status}"
    return str(message).splitlines()[0]


def _entry(job: Any, pods: tuple[Pod, ...]) -> Entry:
    conditions = [c for c in (job.status and job.status.conditions) or [] if c.status == "True"]
    chosen = next((c for c in conditions if c.type in ENDED), None)
    chosen = chosen or next((c for c in conditions if c.type == "Suspended"), None)
    return Entry(
        app_id=f"{job.metadata.namespace}:{job.metadata.name}",
        condition=chosen.type if chosen is not None else "",
        message=str(chosen.message or chosen.reason or "") if chosen is not None else "",
        active=(job.status and job.status.active) or 0,
        failed=(job.status and job.status.failed) or 0,
        nodes=job.spec.completions or 1,
        pods=pods,
    )


def _pod(pod: Any) -> Pod:
    annotations = pod.metadata.annotations or {}
    statuses = pod.status.container_statuses or []
    state = statuses[0].state if statuses else None
    ended = state.terminated if state is not None else None
    waiting = state.waiting if state is not None else None
    unscheduled = [c for c in pod.status.conditions or [] if c.type == "PodScheduled" and c.status == "False"]
    reason = waiting.reason if waiting is not None else unscheduled[0].message if unscheduled else ""
    return Pod(
        name=pod.metadata.name,
        index=int(annotations.get("batch.kubernetes.io/job-completion-index", 0)),
        phase=pod.status.phase or "Pending",
        node=pod.spec.node_name or "",
        exit_code=ended.exit_code if ended is not None else None,
        reason=reason or "",
    )
