"""Kubernetes: a job as plain objects that need no operator. Pure.

An Indexed Job starts one pod a node; a pod's completion index is its node rank. A headless Service gives
the pods names, and they meet at pod 0's. The resolved run comes from a ConfigMap. Exit codes decide through
the Job's podFailurePolicy what happens next, as the batch script does under Slurm.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

import yaml

from service.cluster import presets
from service.cluster.job import Job, run_yaml
from service.errors import EXIT_CONFIG, EXIT_STOPPED, EXIT_UNRECOVERABLE, UserError
from service.launch.rendezvous import DEFAULT_PORT

IMAGE = "hiera-train:latest"
"""When cluster.image is null: a name that a kustomization's `images` can replace."""
APP = "hiera-train"
CONTAINER = "train"
RUN_FILE = "/etc/hiera-train/run.yaml"
EXTRA_GRACE_SECONDS = 60
"""Beyond runtime.grace_seconds: the launcher kills what did not stop, and writes the state down."""
MAX_NAME = 52
"""Of 63 characters of a host name, -1023 and what a Service may add are left free."""

Manifest = dict[str, Any]


def render(job: Job) -> str:
    """All objects of a job as YAML documents."""
    text = "".join("---\n" + dump(manifest) for manifest in manifests(job))
    return f"# {job.name}: rendered by hiera-train.\n{text}"


def manifests(job: Job) -> list[Manifest]:
    """All objects of a job: claims, ConfigMap, Service, Job, and a PodMonitor if asked for.

    Raises UserError for what has no meaning here or no data.
    """
    if job.seeds or job.after is not None:
        raise UserError("--seeds and --after: only Slurm has job arrays and dependencies")
    settings = job.cluster.kubernetes
    if job.config.data.kind != "synthetic" and job.config.data.path is None and settings.data_claim is None:
        raise UserError("data.path: null although cluster.kubernetes.data_claim is null; set one of them")
    found = [*_claims(job), _config_map(job), _service(job), _job(job)]
    if settings.pod_monitor:
        found.append(_pod_monitor(job))
    if settings.namespace is not None:
        for manifest in found:
            manifest["metadata"]["namespace"] = settings.namespace
    return found


def object_name(name: str) -> str:
    """A job's name as that of its objects and host names: small letters, digits and dashes."""
    plain = re.sub(r"[^a-z0-9-]+", "-", name.lower())[:MAX_NAME].strip("-")
    if not plain:
        raise UserError(f"--name: {name!r} holds no letter or digit that a Kubernetes name could keep")
    return plain if plain[0].isalpha() else f"run-{plain}"[:MAX_NAME].strip("-")


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dump(data: Any) -> str:
    """One YAML document."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def labels(job: Job) -> dict[str, str]:
    """Labels of all objects of a job, by which they are found again."""
    return {"app.kubernetes.io/name": APP, "app.kubernetes.io/instance": object_name(job.name)}


def _metadata(job: Job, name: str | None = None) -> Manifest:
    return {"name": name or object_name(job.name), "labels": labels(job)}


def _claims(job: Job) -> list[Manifest]:
    """Claims of data, runs and caches. They are shared by runs, hence without the labels of one."""
    settings = job.cluster.kubernetes
    names = [settings.data_claim, settings.runs_claim, settings.cache_claim]
    if not settings.create_claims:
        return []
    spec: Manifest = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": settings.storage}},
    }
    if settings.storage_class is not None:
        spec["storageClassName"] = settings.storage_class
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": APP}},
            "spec": spec,
        }
        for name in dict.fromkeys(names)
        if name is not None
    ]


def _config_map(job: Job) -> Manifest:
    config = job.config
    data_claim = job.cluster.kubernetes.data_claim
    changes: dict[str, dict[str, Any]] = {}
    if config.run.dir is None:
        changes["run"] = {"dir": f"/runs/{config.run.name}"}
    if config.data.kind != "synthetic" and config.data.path is None and data_claim is not None:
        changes["data"] = {"path": "/data"}
    if config.runtime.cache_dir is None:
        changes["runtime"] = {"cache_dir": "/cache"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job),
        "data": {"run.yaml": run_yaml(config, **changes)},
    }


def _service(job: Job) -> Manifest:
    ports = [{"name": "rendezvous", "port": DEFAULT_PORT}]
    if job.config.metrics.enabled and job.config.metrics.port:
        ports.append({"name": "metrics", "port": job.config.metrics.port})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            # Pods look for pod 0 before it is ready.
            "publishNotReadyAddresses": True,
            "selector": labels(job),
            "ports": ports,
        },
    }


def _job(job: Job) -> Manifest:
    settings = job.cluster.kubernetes
    nodes = job.cluster.nodes
    metadata = _metadata(job)
    if settings.queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = settings.queue
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # One trouble ends all pods of a run.
        "backoffLimit": settings.retries * nodes,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _exit_codes(EXIT_UNRECOVERABLE, EXIT_CONFIG)},
                # Preempted, drained, evicted: not the run's failure.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": _exit_codes(EXIT_STOPPED)},
            ]
        },
    }
    if settings.ttl_seconds is not None:
        spec["ttlSecondsAfterFinished"] = settings.ttl_seconds
    spec["template"] = {
        "metadata": {"labels": labels(job), "annotations": _annotations(job)},
        "spec": _pod(job),
    }
    if not spec["template"]["metadata"]["annotations"]:
        del spec["template"]["metadata"]["annotations"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _exit_codes(*codes: int) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": sorted(codes)}


def _annotations(job: Job) -> dict[str, str]:
    metrics = job.config.metrics
    if not metrics.enabled or not metrics.port:
        return {}
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(metrics.port),
        "prometheus.io/path": "/metrics",
    }


def _pod(job: Job) -> Manifest:
    settings = job.cluster.kubernetes
    preset = presets.node(job.cluster)
    node_labels = {**(preset.labels if preset is not None else {}), **settings.node_selector}
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": object_name(job.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(job.config.runtime.grace_seconds) + EXTRA_GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.run_as_user,
            "runAsGroup": settings.run_as_user,
            "fsGroup": settings.run_as_user,
            # Else the kubelet walks through millions of files of the data at each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    for field, value in (
        ("serviceAccountName", settings.service_account),
        ("priorityClassName", settings.priority_class),
        ("imagePullSecrets", [{"name": name} for name in settings.image_pull_secrets]),
        ("nodeSelector", node_labels),
        ("tolerations", [_toleration(text) for text in settings.tolerations] if job.gpus else []),
        ("affinity", _affinity(job)),
        ("topologySpreadConstraints", _spread(job)),
    ):
        if value:
            pod[field] = value
    volumes, mounts = _volumes(job)
    pod["containers"] = [_container(job, mounts)]
    pod["volumes"] = volumes
    return pod


def _toleration(text: str) -> Manifest:
    key, _, effect = text.partition(":")
    key, equals, value = key.partition("=")
    toleration = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        toleration["value"] = value
    if effect:
        toleration["effect"] = effect
    return toleration


def _affinity(job: Job) -> Manifest:
    """All pods near each other: a preference, so that a run is not kept waiting for ever."""
    key = job.cluster.kubernetes.topology_key
    if key is None or job.cluster.nodes == 1:
        return {}
    term = {"labelSelector": {"matchLabels": labels(job)}, "topologyKey": key}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _spread(job: Job) -> list[Manifest]:
    """One pod a node where there are enough nodes."""
    if job.cluster.nodes == 1:
        return []
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels(job)},
        }
    ]


def _container(job: Job, mounts: list[Manifest]) -> Manifest:
    fabric = presets.network(job.cluster)
    name = object_name(job.name)
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    variables: list[Manifest] = [{"name": "HIERA_NODE_RANK", "valueFrom": {"fieldRef": index}}]
    if job.cluster.nodes > 1:
        variables.append({"name": "HIERA_NNODES", "value": str(job.cluster.nodes)})
        variables.append({"name": "HIERA_RDZV_ENDPOINT", "value": f"{name}-0.{name}:{DEFAULT_PORT}"})
    for variable, value in presets.environment(job.cluster).items():
        # Kubernetes expands $(NAME); $$ is the character.
        variables.append({"name": variable, "value": value.replace("$", "$$")})
    capabilities: Manifest = {"drop": ["ALL"]}
    if fabric is not None and fabric.lock_memory:
        # Registered memory is locked, and the default limit is 64 KiB.
        capabilities["add"] = ["IPC_LOCK"]
    resources = _resources(job)
    container: Manifest = {
        "name": CONTAINER,
        "image": job.cluster.image or IMAGE,
        # The image's own entry point is kept: it reaps, and forwards signals.
        "args": ["run", "--config", RUN_FILE],
        "env": variables,
        "ports": [{"name": "rendezvous", "containerPort": DEFAULT_PORT}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": capabilities,
        },
        "volumeMounts": mounts,
    }
    if job.config.metrics.enabled and job.config.metrics.port:
        container["ports"].append({"name": "metrics", "containerPort": job.config.metrics.port})
    if resources:
        # Equal requests and limits are the Guaranteed class, the last to be evicted.
        container["resources"] = {"requests": resources, "limits": dict(resources)}
    return container


def _resources(job: Job) -> dict[str, str]:
    settings = job.cluster.kubernetes
    preset, fabric = presets.node(job.cluster), presets.network(job.cluster)
    resources = dict(preset.resources) if preset is not None and settings.resources is None else {}
    if job.gpus:
        resources[settings.gpu_resource] = str(job.gpus)
    if fabric is not None:
        resources.update(fabric.resources)
    return {**resources, **(settings.resources or {})}


def _volumes(job: Job) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes of the pod and their mounts in the container."""
    settings = job.cluster.kubernetes
    volumes: list[Manifest] = [
        {"name": "run", "configMap": {"name": object_name(job.name)}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm_size}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Manifest] = [
        {"name": "run", "mountPath": "/etc/hiera-train", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    for name, claim in (("runs", settings.runs_claim), ("cache", settings.cache_claim)):
        mount: Manifest = {"name": name, "mountPath": f"/{name}"}
        if claim is None:
            volumes.append({"name": name, "emptyDir": {}})
        else:
            volumes.append(_claim(name, claim))
            if name == "cache":
                # A compile cache is never shared live: a folder a pod, which its successor finds again.
                mount["subPathExpr"] = "$(HIERA_NODE_RANK)"
        mounts.append(mount)
    if settings.data_claim is not None and job.config.data.kind != "synthetic":
        volumes.append(_claim("data", settings.data_claim, read_only=True))
        mounts.append({"name": "data", "mountPath": "/data", "readOnly": True})
    for number, (claim, path) in enumerate(settings.volumes.items()):
        volumes.append(_claim(f"volume-{number}", claim))
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    # The API server refuses a path that is there twice.
    paths = [posixpath.normpath(mount["mountPath"]) for mount in mounts]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise UserError(f"cluster.kubernetes.volumes: {twice[0]} holds several claims; give each a path of its own")
    return volumes, mounts


def _claim(name: str, claim: str, *, read_only: bool = False) -> Manifest:
    source: Manifest = {"claimName": claim}
    if read_only:
        source["readOnly"] = True
    return {"name": name, "persistentVolumeClaim": source}


def _pod_monitor(job: Job) -> Manifest:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _metadata(job),
        "spec": {
            "selector": {"matchLabels": labels(job)},
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "15s"}],
        },
    }
