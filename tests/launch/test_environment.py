"""The workers' environment: allocator presets, caches, threads, user; a pure function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.config.schema import RunConfig
from service.errors import UserError
from service.launch.environment import (
    ALLOCATOR_PRESETS,
    ALLOCATOR_VARIABLES,
    NodeFacts,
    allocator_settings,
    check_reported,
    environment,
)
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


@pytest.mark.parametrize("preset", sorted(ALLOCATOR_PRESETS))
def test_both_names_get_one_value(preset: str) -> None:
    variables, _ = build(allocator=preset)
    assert variables.get(ALLOCATOR_VARIABLES[0]) == variables.get(ALLOCATOR_VARIABLES[1])
    assert variables.get(ALLOCATOR_VARIABLES[0], "") == ALLOCATOR_PRESETS[preset]


def test_large_batch_is_what_the_issue_says() -> None:
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
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == ALLOCATOR_PRESETS["large-batch"]
    assert any("replaces the environment's" in note for note in notes)
    _, notes = build({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"})
    assert any("differ" in note and "'b:2'" in note for note in notes)


@pytest.mark.parametrize("text", ["max_split_size_mb:64", "roundup_power2_divisions:[256:1,512:2],backend:native"])
def test_settings_string(text: str) -> None:
    assert allocator_settings(text) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("large_batch", "none of default"),
        ("max_split_size:64", "did you mean 'max_split_size_mb'"),
        ("expandable_segments:", "not key:value"),
        ("zzz:1", "known: backend"),
    ],
)
def test_bad_settings(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        allocator_settings(text)


def test_check_reported_names_the_difference() -> None:
    reported = {"expandable_segments": False, "max_split_size": 512 * 1024 * 1024, "backend": "native"}
    check_reported("max_split_size_mb:512,expandable_segments:False", reported)
    with pytest.raises(UserError, match="expandable_segments=False"):
        check_reported("expandable_segments:True", reported)
    with pytest.raises(UserError, match="max_split_size="):
        check_reported("max_split_size_mb:64", reported)


@pytest.mark.parametrize("preset", ["large-batch", "debug", "default"])
def test_torch_reports_what_was_set(preset: str) -> None:
    variables, _ = build(allocator=preset)
    inherited = {k: v for k, v in os.environ.items() if k not in ALLOCATOR_VARIABLES}
    code = "import json; from service.launch.environment import verify_allocator as v; print(json.dumps(v()))"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout)["settings"] in (ALLOCATOR_PRESETS[preset], None)


def test_a_torch_that_was_configured_otherwise_is_found_out() -> None:
    code = (
        "import os, torch; from service.launch.environment import verify_allocator\n"
        "torch._C._accelerator_setAllocatorSettings('max_split_size_mb:32')\n"
        "verify_allocator()"
    )
    variables, _ = build(allocator="large-batch")
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "UserError: the allocator runs with 'max_split_size_mb:32'" in answer.stderr


def test_caches_threads_and_interface() -> None:
    variables, notes = build(nnodes=2, interface="ib0")
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == "/cache/key/inductor"
    assert variables["TRITON_CACHE_DIR"] == "/cache/key/triton"
    assert variables["OMP_NUM_THREADS"] == "8"
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
