"""Environment of the workers: allocator, compile caches, threads, NUMA, network interface, user.

`environment` is a pure function of the configuration and of what `inspect_node` found; it returns the
variables to set and notes for the user. A variable that the user has set stays, unless the configuration
says otherwise.
"""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from service.config.allocator import allocator_settings
from service.config.schema import RunConfig
from service.launch import caches, hardware, numa

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name since torch 2.9 and the older one; both get one value, since which wins depends on the version."""


@dataclass(frozen=True)
class NodeFacts:
    """What `environment` needs to know of a node. `workers` is the number of worker processes on it."""

    workers: int
    gpus: tuple[hardware.Gpu, ...] = ()
    cores: tuple[int, ...] = (0,)
    quota: float | None = None
    uid: int = 0
    user_known: bool = True
    home_writable: bool = True
    cache: Path = Path("/tmp/hiera-train-cache")
    numa: tuple[tuple[int, ...], ...] = field(default=())


def inspect_node(config: RunConfig, base: Mapping[str, str]) -> tuple[NodeFacts, list[str]]:
    """Look at this machine; returns the facts and notes. Raises UserError when no cache directory can be
    used.
    """
    gpus = [] if config.runtime.device == "cpu" else hardware.visible_gpus(hardware.find_gpus(), base)
    workers = hardware.workers_per_node(config.runtime.nproc_per_node, config.runtime.device, gpus)
    uid = os.getuid()
    key = caches.cache_key(
        torch=hardware.package_version("torch"),
        triton=hardware.package_version("triton"),
        cuda=hardware.cuda_version(),
        gpu=gpus[0].name if gpus else "cpu",
        arch=hardware.machine(),
    )
    home = base.get("HOME")
    home_writable = bool(home) and Path(home or "").is_dir() and os.access(home or "", os.W_OK | os.X_OK)
    cache_base = dict(base) if home_writable else {k: v for k, v in base.items() if k != "HOME"}
    cache, notes = caches.prepare_cache(config.runtime.cache_dir, key, cache_base, uid)
    cores = hardware.available_cores()
    plan = numa.numa_plan(gpus, workers, cores) if config.runtime.numa else []
    facts = NodeFacts(
        workers=workers,
        gpus=tuple(gpus),
        cores=tuple(cores),
        quota=hardware.cpu_quota(),
        uid=uid,
        user_known=_user_known(uid),
        home_writable=home_writable,
        cache=cache,
        numa=tuple(tuple(part) for part in plan),
    )
    return facts, notes


def _user_known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def environment(
    config: RunConfig,
    facts: NodeFacts,
    base: Mapping[str, str],
    *,
    nnodes: int = 1,
    interface: str | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Variables to set for torchrun and the workers beyond `base`, and notes for the user. Pure.

    `interface` is the network interface for NCCL and gloo, None to leave the choice to them.
    """
    variables: dict[str, str] = {}
    notes: list[str] = []
    captured = config.train.capture != "off" and config.runtime.device != "cpu" and bool(facts.gpus)
    captured_collectives = captured and facts.workers * nnodes > 1

    value = _allocator(config.runtime.allocator, base, notes)
    if value:
        variables.update(dict.fromkeys(ALLOCATOR_VARIABLES, value))
    if config.runtime.allocator == "debug":
        variables["TORCH_SHOW_CPP_STACKTRACES"] = "1"
    if captured_collectives or config.runtime.allocator == "captured-ddp":
        variables["NCCL_GRAPH_REGISTER"] = base.get("NCCL_GRAPH_REGISTER", "0")
    if captured_collectives and re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
        notes.append(
            "warning: expandable segments together with captured collectives are known to hang; "
            "use runtime.allocator=captured-ddp or train.capture=off if the run stops advancing"
        )

    for name, folder in (
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
        ("TRITON_CACHE_DIR", "triton"),
        ("TRITON_HOME", "triton-home"),
        ("CUDA_CACHE_PATH", "cuda"),
        ("TORCH_EXTENSIONS_DIR", "extensions"),
    ):
        if config.runtime.cache_dir is not None or not base.get(name):
            variables[name] = str(facts.cache / folder)

    variables["OMP_NUM_THREADS"] = _threads(config.runtime.threads, facts, base)
    # Threads that spin for each other starve on a machine that is shared: the quick start fell from 90 to 3 samples/s
    # beside a second one on two cores.
    variables["OMP_WAIT_POLICY"] = base.get("OMP_WAIT_POLICY") or "PASSIVE"
    variables[numa.PLAN_VARIABLE] = json.dumps([list(part) for part in facts.numa]) if facts.numa else "[]"

    # getpass.getuser, which torch calls, needs a name; many libraries write below HOME.
    if not facts.user_known:
        for name in ("USER", "LOGNAME"):
            if not base.get(name):
                variables[name] = f"uid{facts.uid}"
    if not facts.home_writable:
        variables["HOME"] = str(facts.cache / "home")

    if interface is not None:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if not base.get(name):
                variables[name] = interface
        if nnodes > 1:
            notes.append(f"network interface: {variables.get('NCCL_SOCKET_IFNAME', 'as set')}")
    return variables, notes


def _allocator(allocator: str, base: Mapping[str, str], notes: list[str]) -> str:
    """The value both variables get; what the user's environment says counts only while the preset is
    `default`.
    """
    configured = allocator_settings(allocator)
    inherited = next((base[name] for name in ALLOCATOR_VARIABLES if base.get(name)), "")
    if not inherited:
        return configured
    if allocator != "default":
        if inherited != configured:
            notes.append(f"runtime.allocator={allocator} replaces the environment's {inherited!r}")
        return configured
    if any(base.get(name) not in (None, "", inherited) for name in ALLOCATOR_VARIABLES):
        notes.append(
            f"warning: {' and '.join(ALLOCATOR_VARIABLES)} differ in the environment; both become {inherited!r}"
        )
    return inherited


def _threads(configured: int | None, facts: NodeFacts, base: Mapping[str, str]) -> str:
    if configured is not None:
        return str(configured)
    if base.get("OMP_NUM_THREADS"):
        return base["OMP_NUM_THREADS"]
    cores = float(len(facts.cores)) if facts.quota is None else min(len(facts.cores), facts.quota)
    share = int(cores / facts.workers)
    if facts.numa:
        share = min(share, *(len(part) for part in facts.numa))
    return str(max(1, share))
