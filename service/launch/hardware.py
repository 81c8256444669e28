"""What this machine has, found without importing torch: GPUs, cores, NUMA nodes and package versions.

Nothing here raises: a login node without a driver gives no GPUs, an unreadable /sys gives no NUMA nodes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """One GPU: `index` in the driver's order, `bus` as in /sys/bus/pci/devices (0000:65:00.0), `uuid`
    GPU-….
    """

    index: int
    name: str
    bus: str
    uuid: str = ""


def package_version(name: str) -> str:
    """Version of an installed distribution; "none" when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def cuda_version() -> str:
    """CUDA version that torch was built for, read from torch/version.py without importing torch; "none"
    on CPU.
    """
    spec = importlib.util.find_spec("torch")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        try:
            text = (Path(location) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        match = re.search(r"^cuda[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
        if match is not None:
            return match.group(1)
    return "none"


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """GPUs from `nvidia-smi --query-gpu=index,name,pci.bus_id,uuid --format=csv,noheader`."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not fields[0].isdigit():
            continue
        gpus.append(Gpu(int(fields[0]), fields[1], pci_address(fields[2]), fields[3]))
    return gpus


def pci_address(bus: str) -> str:
    """The driver's 00000000:65:00.0 as /sys spells it, 0000:65:00.0."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def find_gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> list[Gpu]:
    """GPUs of the NVIDIA driver in its order: nvidia-smi, else the driver's files under /proc."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,name,pci.bus_id,uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        pass
    else:
        gpus = parse_nvidia_smi(answer.stdout)
        if gpus:
            return gpus
    gpus = []
    try:
        # Bus order is the order that nvidia-smi counts in.
        directories = sorted(driver.iterdir())
    except OSError:
        return []
    for index, directory in enumerate(directories):
        try:
            text = (directory / "information").read_text(encoding="utf-8")
        except OSError:
            text = ""
        name = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(\S+)$", text, re.MULTILINE)
        gpus.append(Gpu(index, name.group(1).strip() if name else "gpu", directory.name, uuid.group(1) if uuid else ""))
    return gpus


def visible_gpus(gpus: list[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """GPUs that CUDA will show, in its order: CUDA_VISIBLE_DEVICES as indices or (shortened) UUIDs.

    As CUDA does, the list ends at the first entry that names no GPU. MIG instances stand for themselves: they
    have no PCI device of their own here, but they count.
    """
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("MIG-"):
            chosen.append(Gpu(-1, "MIG", "", entry))
            continue
        if entry.isdigit():
            found = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            found = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if not found:
            break
        chosen.append(found[0])
    return chosen


def workers_per_node(nproc: int | str, device: str, gpus: list[Gpu]) -> int:
    """Worker processes on this node: the number asked for, else one a visible GPU, else one."""
    if nproc != "auto":
        return int(nproc)
    if device == "cpu":
        return 1
    return max(1, len(gpus))


def available_cores() -> list[int]:
    """Cores this process may run on (affinity mask: what Slurm, cgroups' cpuset and taskset leave)."""
    return sorted(os.sched_getaffinity(0))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPU time a second that the control group allows (docker --cpus), in cores; None when not limited."""
    try:
        limit, period = (root / "cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota = int((root / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return None if quota <= 0 else quota / period_us
    except (OSError, ValueError, ZeroDivisionError):
        return None


def parse_cpu_list(text: str) -> list[int]:
    """`0-3,8,10-11` of /sys as [0, 1, 2, 3, 8, 10, 11]. Raises ValueError on anything else."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def gpu_numa_node(bus: str, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """NUMA node of a PCI device; None when the machine does not say (-1, or no such file)."""
    try:
        node = int((root / bus / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def numa_cores(node: int, root: Path = Path("/sys/devices/system/node")) -> list[int]:
    """Cores of a NUMA node; empty when unknown, and for memory-only nodes (the HBM of a GH200 is one)."""
    try:
        return parse_cpu_list((root / f"node{node}" / "cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return []


def machine() -> str:
    """Architecture as the kernel names it: x86_64, aarch64."""
    return platform.machine() or "unknown"
