"""The `cluster` section: where a run of several nodes is placed, and what the scheduler is asked for.

Fields of Slurm are named as sbatch's own options, those of Kubernetes as the objects' own fields. Nothing
here changes what is trained.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from service.config.fields import PATTERN_WORDS, ExpandedPath, OneLine, Positive, Section

SLURM_TIME = r"^(?:\d+(?::\d\d){0,2}|\d+-\d+(?::\d\d){0,2})$"
DNS_LABEL = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
DNS_NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
QUANTITY = r"^[0-9]+(?:\.[0-9]+)?(?:m|k|[KMGTPE]i?)?$"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOLERATION = re.compile(r"[\w./-]+(?:=[\w.-]*)?(?::(?:NoSchedule|PreferNoSchedule|NoExecute))?")
_QUANTITY = re.compile(QUANTITY)
_LABEL_KEY = re.compile(r"(?:[a-z0-9.-]+/)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")

PATTERN_WORDS.update(
    {
        SLURM_TIME: "minutes, hours:minutes:seconds or days-hours",
        DNS_LABEL: "a name of small letters, digits and '-'",
        DNS_NAME: "a name of small letters, digits, '-' and '.'",
        QUANTITY: 'a quantity such as "8", 500m or 64Gi',
    }
)

DnsName = Annotated[str, Field(pattern=DNS_NAME, max_length=253)]
DnsLabel = Annotated[str, Field(pattern=DNS_LABEL, max_length=63)]
Quantity = Annotated[str, Field(pattern=QUANTITY)]


class SlurmSection(Section):
    """What sbatch and srun are asked for; null leaves an option out, so that the site's default holds."""

    time: Annotated[str, Field(pattern=SLURM_TIME)] | None = "24:00:00"
    """Time limit, as minutes, hours:minutes:seconds or days-hours; the run resumes after it."""
    partition: OneLine | None = None
    """Partition, or several with commas."""
    account: OneLine | None = None
    """Account that is charged."""
    qos: OneLine | None = None
    """Quality of service."""
    constraint: OneLine | None = None
    """Node features that are wanted, e.g. "h100&nvme"."""
    exclude: OneLine | None = None
    """Nodes that are not wanted, as a node list."""
    reservation: OneLine | None = None
    """Reservation that the job runs in."""
    mem: OneLine | None = None
    """Memory a node, e.g. 500G; 0 is all of it. Null: the preset's of cluster.node_type."""
    cpus_per_task: Positive | None = None
    """Cores a node, which has one task, the launcher. Null: the preset's of cluster.node_type."""
    exclusive: bool = True
    """No other job on the nodes."""
    extra: tuple[OneLine, ...] = ()
    """Further options of sbatch, whole, e.g. --mail-type=END or --gres=gpu:h100:8."""
    venv: ExpandedPath | None = None
    """Virtual environment that has hiera-train; null: the command is on the job's PATH."""
    setup: tuple[OneLine, ...] = ()
    """Shell commands of the batch script, e.g. module load cuda; all nodes get what they export."""
    container: Literal["none", "pyxis", "apptainer"] = "none"
    """Container runtime that runs cluster.image on the nodes."""
    mounts: tuple[OneLine, ...] = ()
    """Directories in the container: source:target or source:target:ro; the directory of submission, the run
    directory, the logs and the data are always there."""
    signal_seconds: int = Field(default=180, gt=0, le=65535)
    """Seconds before the time limit at which the run has to save and stop; Slurm may be a minute early."""
    max_requeues: int = Field(default=100, ge=0)
    """Times that a job which stopped in order (time limit, preemption) goes back into the queue."""
    max_failures: int = Field(default=3, ge=0)
    """Times that a job goes back into the queue after a failure that a retry may cure, e.g. a lost node."""
    log_dir: ExpandedPath | None = None
    """Directory of the jobs' logs, on a shared file system; null: logs in the directory of submission."""

    @field_validator("extra")
    @classmethod
    def _options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if not re.match(r"--[a-z]|-[A-Za-z]", option):
                raise ValueError(f"{option!r} is no option of sbatch; write it whole, e.g. --mail-type=END")
        return value

    @field_validator("mounts")
    @classmethod
    def _mounts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for mount in value:
            if not re.fullmatch(r"[^:,]+:/[^:,]*(?::ro|:rw)?", mount):
                raise ValueError(
                    f"{mount!r} is not source:target or source:target:ro (container runtimes part mounts "
                    "at colons and commas)"
                )
        return value


class KubernetesSection(Section):
    """What the Job's pods ask for; null leaves a field out, so that the cluster's default holds."""

    namespace: DnsLabel | None = None
    """Namespace; null: that of the current context."""
    image_pull_secrets: tuple[DnsName, ...] = ()
    """Secrets that the registry of cluster.image wants."""
    resources: dict[str, str] | None = None
    """Resources of a pod beside its GPUs, requested and limited alike, e.g. {cpu: "88", memory: 900Gi,
    rdma/hca: "1"}. Null: the preset's of cluster.node_type."""
    gpu_resource: OneLine = "nvidia.com/gpu"
    """Name of the GPU resource."""
    node_selector: dict[str, str] = Field(default={})
    """Labels that nodes must have, beside the preset's of cluster.node_type."""
    tolerations: tuple[OneLine, ...] = ("nvidia.com/gpu:NoSchedule",)
    """Taints that are tolerated: key, key:Effect or key=value:Effect."""
    priority_class: DnsName | None = None
    """Priority class of the pods."""
    service_account: DnsName | None = None
    """Service account; its token is never mounted."""
    queue: DnsName | None = None
    """Kueue's local queue, as a label of the Job; null: no queue."""
    topology_key: OneLine | None = None
    """Node label whose value the pods should share, e.g. topology.kubernetes.io/zone; null: no preference."""
    data_claim: DnsName | None = "hiera-data"
    """Volume claim of the training data, read-only at /data; null: none."""
    runs_claim: DnsName | None = "hiera-runs"
    """Volume claim of the run directories at /runs, shared by all pods; null: lost with the pod."""
    cache_claim: DnsName | None = None
    """Volume claim of the compile caches at /cache, with a folder for each pod; null: lost with the pod."""
    volumes: dict[str, str] = Field(default={})
    """Further volume claims and the directories they are mounted at."""
    create_claims: bool = True
    """Make the claims of data, runs and cache where they do not exist."""
    storage_class: DnsName | None = None
    """Storage class of claims that are made; it must allow several nodes to write (ReadWriteMany)."""
    storage: Quantity = "500Gi"
    """Size of each claim that is made."""
    shm_size: Quantity = "16Gi"
    """Size limit of /dev/shm, which counts as the pod's memory."""
    run_as_user: int = Field(default=10001, gt=0)
    """User and group id of the processes and of what they write."""
    retries: int = Field(default=3, ge=0)
    """Failures a node that are tried again; preemptions and orderly stops do not count."""
    ttl_seconds: int | None = Field(default=604800, ge=0)
    """Seconds after which an ended Job is deleted; null: never."""
    pod_monitor: bool = False
    """Also make a PodMonitor, which needs the Prometheus operator; pods are annotated for scraping anyway."""

    @field_validator("resources")
    @classmethod
    def _quantities(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for name, quantity in (value or {}).items():
            if not _QUANTITY.fullmatch(quantity):
                raise ValueError(f'{name}: {quantity!r} is not a quantity such as "8", 500m or 64Gi')
        return value

    @field_validator("node_selector")
    @classmethod
    def _labels(cls, value: dict[str, str]) -> dict[str, str]:
        for key in value:
            if not _LABEL_KEY.fullmatch(key):
                raise ValueError(f"{key!r} is not the key of a label")
        return value

    @field_validator("tolerations")
    @classmethod
    def _tolerations(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for toleration in value:
            if not _TOLERATION.fullmatch(toleration):
                raise ValueError(f"{toleration!r} is not key, key:Effect or key=value:Effect")
        return value

    @field_validator("volumes")
    @classmethod
    def _volumes(cls, value: dict[str, str]) -> dict[str, str]:
        taken = {"/data", "/runs", "/cache", "/tmp", "/dev/shm", "/etc/hiera-train"}
        for claim, path in value.items():
            if not re.fullmatch(DNS_NAME, claim):
                raise ValueError(f"{claim!r} is not the name of a volume claim")
            if not path.startswith("/") or path.rstrip("/") in taken | {""}:
                raise ValueError(f"{path!r} is not a free absolute directory for {claim}")
        return value


class ClusterSection(Section):
    """Nodes, their hardware and network, and the schedulers that place them."""

    nodes: int = Field(default=1, gt=0)
    """Number of nodes; each runs one launcher."""
    gpus_per_node: int | None = Field(default=None, ge=0)
    """GPUs a node; 0: none, the run is on CPUs. Null: the preset's of cluster.node_type, or 8."""
    node_type: Literal["h100-8", "gh200-4"] | None = None
    """Preset of a node, eight H100 or four GH200: GPUs, cores, memory, architecture where null."""
    network: Literal["infiniband", "efa", "slingshot", "tcp"] | None = None
    """Preset of the network between nodes, variables of NCCL and libfabric; null: NCCL finds out itself."""
    image: OneLine | None = None
    """Container image that has hiera-train, for Kubernetes, Docker and Slurm's container runtimes."""
    environment: dict[str, str] = Field(default={})
    """Further environment variables of the job; they win over the presets'."""
    slurm: SlurmSection = SlurmSection()
    """What sbatch and srun are asked for."""
    kubernetes: KubernetesSection = KubernetesSection()
    """What the Job's pods ask for."""

    @field_validator("environment")
    @classmethod
    def _variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
            if "\0" in text:
                raise ValueError(f"{name}: a variable cannot hold a NUL character")
        return value

    @model_validator(mode="after")
    def _image(self) -> ClusterSection:
        if self.slurm.container != "none" and self.image is None:
            raise ValueError(f"image: null although cluster.slurm.container is {self.slurm.container}; set it")
        return self
