"""The workers' environment: allocator presets, caches, threads, user; a pure function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.config.allocator import PRESETS
from service.config.schema import RunConfig
from service.launch.environment import ALLOCATOR_VARIABLES, NodeFacts, environment
from service.launch.hardware import Gpu

GPUS = tuple(Gpu(index, "NVIDIA H200", f"0000:0{index}:00.0", f"GPU-{index}") for index in range(4))


def build(
    base: dict[str, str] | None = None,
    facts: NodeFacts | None = None,
    nnodes: int = 1,
    interface: str | None = None,
    **runtime: Any,
) -> tuple[dict[str, str], list[str]]:
    """`environment` with these runtime fields."""
    config = RunConfig.model_validate({"runtime": runtime, "data": {"kind": "synthetic"}})
    facts = facts or NodeFacts(workers=4, gpus=GPUS, cores=tuple(range(32)), cache=Path("/cache/key"))
    return environment(config, facts, base or {}, nnodes=nnodes, interface=interface)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_both_names_get_one_value(preset: str) -> None:
    variables, _ = build(allocator=preset)
    assert variables.get(ALLOCATOR_VARIABLES[0]) == variables.get(ALLOCATOR_VARIABLES[1])
    assert variables.get(ALLOCATOR_VARIABLES[0], "") == PRESETS[preset]


def test_large_batch_warns_of_captured_collectives() -> None:
    variables, notes = build(allocator="large-batch")
    assert variables["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:512,expandable_segments:True"
    assert any("captured-ddp" in note for note in notes)
    assert variables["NCCL_GRAPH_REGISTER"] == "0"


def test_no_warning_where_nothing_is_captured_or_shared() -> None:
    one = NodeFacts(workers=1, gpus=GPUS[:1])
    assert build(allocator="large-batch", facts=one)[1] == []
    cpu = NodeFacts(workers=4)
    assert build(allocator="large-batch", facts=cpu)[1] == []
    assert build(allocator="captured-ddp")[1] == []


def test_environment_of_the_user_counts_only_for_the_default_preset() -> None:
    variables, notes = build({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})
    assert variables["PYTORCH_ALLOC_CONF"] == variables["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    assert notes == []
    variables, notes = build({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, allocator="large-batch")
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == PRESETS["large-batch"]
    assert any("replaces the environment's" in note for note in notes)
    _, notes = build({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"})
    assert any("differ" in note and "'b:2'" in note for note in notes)


def test_caches_threads_and_interface() -> None:
    variables, notes = build(nnodes=2, interface="ib0")
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == "/cache/key/inductor"
    assert variables["TRITON_CACHE_DIR"] == "/cache/key/triton"
    assert variables["OMP_NUM_THREADS"] == "8"
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE"
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "ib0"
    assert notes == ["network interface: ib0"]
    variables, _ = build({"NCCL_SOCKET_IFNAME": "eth7", "TRITON_CACHE_DIR": "/mine"}, interface="lo")
    assert "NCCL_SOCKET_IFNAME" not in variables
    assert "TRITON_CACHE_DIR" not in variables
    assert build({"TRITON_CACHE_DIR": "/mine"}, cache_dir="/x")[0]["TRITON_CACHE_DIR"].startswith("/cache")


@pytest.mark.parametrize(
    ("facts", "threads"),
    [
        (NodeFacts(workers=4, cores=tuple(range(32)), quota=6.0), "1"),
        (NodeFacts(workers=1, cores=tuple(range(32)), quota=6.5), "6"),
        (NodeFacts(workers=8, cores=(0, 1)), "1"),
        (NodeFacts(workers=2, cores=tuple(range(32)), numa=((0, 1, 2), (3, 4, 5))), "3"),
    ],
)
def test_threads(facts: NodeFacts, threads: str) -> None:
    assert build(facts=facts)[0]["OMP_NUM_THREADS"] == threads
    assert build({"OMP_NUM_THREADS": "5"}, facts=facts)[0]["OMP_NUM_THREADS"] == "5"
    assert build({"OMP_NUM_THREADS": "5"}, facts=facts, threads=7)[0]["OMP_NUM_THREADS"] == "7"


def test_unknown_user_without_home() -> None:
    facts = NodeFacts(workers=1, uid=54321, user_known=False, home_writable=False, cache=Path("/c"))
    variables, _ = build(facts=facts)
    assert variables["USER"] == variables["LOGNAME"] == "uid54321"
    assert variables["HOME"] == "/c/home"
    variables, _ = build({"USER": "me"}, facts=NodeFacts(workers=1))
    assert not {"USER", "LOGNAME", "HOME"} & set(variables)
