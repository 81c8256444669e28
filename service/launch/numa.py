"""NUMA binding: each worker on the cores beside its GPU (GH200: one Grace CPU a GPU).

The launcher makes the plan, because it knows all workers; each worker binds itself, before it starts threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from service.launch.hardware import Gpu, gpu_numa_node, numa_cores

PLAN_VARIABLE = "HIERA_CORES"
"""JSON: a list of cores for each local rank; unset or empty: no binding."""


def numa_plan(
    gpus: Sequence[Gpu],
    workers: int,
    allowed: Sequence[int],
    *,
    pci_root: Path = Path("/sys/bus/pci/devices"),
    node_root: Path = Path("/sys/devices/system/node"),
) -> list[list[int]]:
    """Cores for each local rank, or [] when binding would not help or the machine does not say enough.

    Workers whose GPUs share a NUMA node share its cores in equal, contiguous parts. Only cores of
    `allowed` are used. [] when any GPU's node is unknown, when a worker would get no core, or when all
    would get all of them.
    """
    if workers < 1 or len(gpus) < workers:
        return []
    nodes = [gpu_numa_node(gpu.bus, pci_root) if gpu.bus else None for gpu in gpus[:workers]]
    if any(node is None for node in nodes):
        return []
    plan: list[list[int]] = []
    for rank, node in enumerate(nodes):
        assert node is not None
        cores = [core for core in numa_cores(node, node_root) if core in set(allowed)]
        sharers = [other for other, its_node in enumerate(nodes) if its_node == node]
        share, place = len(cores) // len(sharers), sharers.index(rank)
        # Hyper-threads of one core are numbered far apart; equal contiguous parts of each half keep them
        # together.
        half = len(cores) // 2
        if len(sharers) > 1 and share >= 2 and _halves_are_siblings(cores):
            part = half // len(sharers)
            mine = cores[place * part : (place + 1) * part]
            mine += cores[half + place * part : half + (place + 1) * part]
        else:
            mine = cores[place * share : (place + 1) * share]
        if not mine:
            return []
        plan.append(mine)
    if all(set(cores) == set(allowed) for cores in plan):
        return []
    return plan


def _halves_are_siblings(cores: Sequence[int]) -> bool:
    """True when the core list is two separate ranges of one length, as hyper-threading numbers them."""
    half, odd = divmod(len(cores), 2)
    if odd or half < 1:
        return False
    first, second = cores[:half], cores[half:]
    return first[-1] - first[0] == half - 1 == second[-1] - second[0] and second[0] > first[-1] + 1


def bind_numa(local_rank: int) -> list[int]:
    """Bind this process and the threads it will start to its cores of the plan; worker side.

    Returns the cores, [] when nothing was done: no plan, or the kernel refuses (a cpuset that changed).
    """
    try:
        plan = json.loads(os.environ.get(PLAN_VARIABLE, "[]"))
        cores = [int(core) for core in plan[local_rank]]
        os.sched_setaffinity(0, cores)
    except (ValueError, IndexError, TypeError, KeyError, OSError):
        return []
    return cores
