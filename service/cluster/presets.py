"""Presets of nodes and of networks between them: what each sets, and why.

A preset fills what the configuration leaves null; `cluster.environment` wins over a network's variables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from service.config.cluster import ClusterSection

DEFAULT_GPUS = 8


@dataclass(frozen=True)
class Node:
    """Hardware of a node: `cpus` cores, `mem` for sbatch, `resources` of a pod, `labels` of its node."""

    about: str
    gpus: int
    cpus: int
    mem: str
    resources: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Network:
    """Variables of a network as name to (value, why), and the capability and resource that RDMA pods need."""

    about: str
    variables: dict[str, tuple[str, str]]
    resources: dict[str, str] = field(default_factory=dict)
    lock_memory: bool = False


NODES: dict[str, Node] = {
    # DGX H100 and its cloud cousins have 96 to 112 physical cores and 2 TB; pods leave some to the system.
    "h100-8": Node(
        about="eight H100 SXM, two x86 sockets",
        gpus=8,
        cpus=96,
        mem="0",
        resources={"cpu": "88", "memory": "900Gi"},
        labels={"kubernetes.io/arch": "amd64"},
    ),
    # Four superchips of 72 Grace cores and 120 GB each; the image has to be built for arm64.
    "gh200-4": Node(
        about="four GH200 superchips, arm64",
        gpus=4,
        cpus=288,
        mem="0",
        resources={"cpu": "272", "memory": "400Gi"},
        labels={"kubernetes.io/arch": "arm64"},
    ),
}

NETWORKS: dict[str, Network] = {
    "infiniband": Network(
        about="InfiniBand or RoCE with Mellanox adapters",
        variables={
            "NCCL_NET": ("IB", "fail at the start instead of falling back to sockets"),
            "NCCL_IB_HCA": ("mlx5", "compute adapters only, no Ethernet ports of other makers"),
            "NCCL_IB_TIMEOUT": ("22", "rides out a rerouted link: 17 s a try instead of 4 s"),
        },
        resources={"rdma/hca": "1"},
        lock_memory=True,
    ),
    "efa": Network(
        about="Elastic Fabric Adapter; the image needs libfabric and the aws-ofi-nccl plugin",
        variables={
            "FI_PROVIDER": ("efa", "no silent fall-back to libfabric's TCP provider"),
            "FI_EFA_USE_DEVICE_RDMA": ("1", "GPUDirect RDMA where libfabric is too old to do it unasked"),
            "FI_EFA_FORK_SAFE": ("1", "registered memory stays valid when compilers are forked"),
            "FI_EFA_USE_HUGE_PAGE": ("0", "forking with huge pages fails with cannot allocate memory"),
        },
        resources={"vpc.amazonaws.com/efa": "32"},
    ),
    "slingshot": Network(
        about="HPE Slingshot 11; needs libfabric's cxi provider and the aws-ofi-nccl plugin",
        variables={
            "NCCL_NET": ("AWS Libfabric", "fail at the start when the plugin is missing, instead of TCP"),
            "NCCL_NET_GDR_LEVEL": ("PHB", "GPUDirect between a GPU and the adapter beside it"),
            "NCCL_CROSS_NIC": ("1", "rings may use another adapter on each node"),
            "FI_MR_CACHE_MONITOR": ("userfaultfd", "the default monitor deadlocks with NCCL's allocations"),
            "FI_CXI_DISABLE_HOST_REGISTER": ("1", "no CUDA call inside the provider, which can deadlock"),
            "FI_CXI_DEFAULT_CQ_SIZE": ("131072", "completion queues that do not overflow on many ranks"),
            "FI_CXI_RX_MATCH_MODE": ("hybrid", "goes on in software when the adapter's matching is full"),
        },
    ),
    "tcp": Network(
        about="Ethernet without RDMA",
        variables={
            "NCCL_IB_DISABLE": ("1", "no search for adapters that are not there"),
            "NCCL_NET": ("Socket", "the same on all nodes, whatever plugins an image has"),
            "NCCL_SOCKET_NTHREADS": ("4", "one thread a connection does not fill 100 Gbit/s"),
            "NCCL_NSOCKS_PERTHREAD": ("4", "several streams a thread, for links that limit each"),
        },
    ),
}


def node(cluster: ClusterSection) -> Node | None:
    """The preset of the nodes, None when none is chosen."""
    return None if cluster.node_type is None else NODES[cluster.node_type]


def network(cluster: ClusterSection) -> Network | None:
    """The preset of the network, None when none is chosen."""
    return None if cluster.network is None else NETWORKS[cluster.network]


def gpus_per_node(cluster: ClusterSection) -> int:
    """GPUs of a node: given, else of the preset, else 8."""
    if cluster.gpus_per_node is not None:
        return cluster.gpus_per_node
    preset = node(cluster)
    return DEFAULT_GPUS if preset is None else preset.gpus


def environment(cluster: ClusterSection) -> dict[str, str]:
    """Variables of the job: of the network's preset, then the configuration's own."""
    preset = network(cluster)
    variables = {} if preset is None else {name: value for name, (value, _) in preset.variables.items()}
    return {**variables, **cluster.environment}


def markdown() -> str:
    """The tables of presets for docs/clusters.md."""
    lines = [
        "| `cluster.node_type` | what | GPUs | cores | pod resources | node labels |",
        "| --- " * 6 + "|",
    ]
    for name, preset in NODES.items():
        resources = ", ".join(f"{key} {value}" for key, value in preset.resources.items())
        labels = ", ".join(f"{key}={value}" for key, value in preset.labels.items())
        lines.append(f"| `{name}` | {preset.about} | {preset.gpus} | {preset.cpus} | {resources} | {labels} |")
    lines += ["", "| `cluster.network` | variable | value | why |", "| --- " * 4 + "|"]
    for name, fabric in NETWORKS.items():
        for variable, (value, why) in fabric.variables.items():
            lines.append(f"| `{name}` | `{variable}` | `{value}` | {why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
