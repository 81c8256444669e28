"""What a machine has: GPUs, quotas, NUMA plans, cache directories; from made-up files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.errors import UserError
from service.launch import caches, hardware, numa
from service.launch.hardware import Gpu

SMI = """0, NVIDIA GH200 480GB, 00000009:01:00.0, GPU-aa11
1, NVIDIA GH200 480GB, 00000019:01:00.0, GPU-bb22
garbage
"""


def test_nvidia_smi() -> None:
    gpus = hardware.parse_nvidia_smi(SMI)
    assert gpus[1] == Gpu(1, "NVIDIA GH200 480GB", "0019:01:00.0", "GPU-bb22")
    assert len(gpus) == 2


def test_driver_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for bus in ("0000:65:00.0", "0000:31:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "gpus" / bus / "information").write_text("Model: \t NVIDIA H200\nGPU UUID: \t GPU-1\n")
    gpus = hardware.find_gpus(tmp_path / "gpus")
    assert [gpu.bus for gpu in gpus] == ["0000:31:00.0", "0000:65:00.0"]
    assert gpus[0].name == "NVIDIA H200"
    assert hardware.find_gpus(tmp_path / "none") == []


def test_visible_devices() -> None:
    gpus = [Gpu(i, "x", f"{i}", f"GPU-{i}{i}") for i in range(4)]
    visible = hardware.visible_gpus
    assert visible(gpus, {}) == gpus
    assert [g.index for g in visible(gpus, {"CUDA_VISIBLE_DEVICES": "2,0"})] == [2, 0]
    assert [g.index for g in visible(gpus, {"CUDA_VISIBLE_DEVICES": "GPU-33,1"})] == [3, 1]
    assert [g.index for g in visible(gpus, {"CUDA_VISIBLE_DEVICES": "1,-1,2"})] == [1]
    assert visible(gpus, {"CUDA_VISIBLE_DEVICES": ""}) == []
    assert len(visible(gpus, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"})) == 2


def test_workers_per_node() -> None:
    gpus = [Gpu(i, "x", "") for i in range(4)]
    assert hardware.workers_per_node("auto", "auto", gpus) == 4
    assert hardware.workers_per_node("auto", "cpu", gpus) == 1
    assert hardware.workers_per_node("auto", "auto", []) == 1
    assert hardware.workers_per_node(3, "cpu", []) == 3


def test_cpu_quota(tmp_path: Path) -> None:
    assert hardware.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert hardware.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert hardware.cpu_quota(tmp_path) is None


def test_cuda_version_without_torch_import() -> None:
    import torch

    assert hardware.cuda_version() == (torch.version.cuda or "none")


def node_files(root: Path, gpu_nodes: dict[str, int], cores: dict[int, str]) -> tuple[Path, Path]:
    for bus, node in gpu_nodes.items():
        (root / "pci" / bus).mkdir(parents=True)
        (root / "pci" / bus / "numa_node").write_text(f"{node}\n")
    for node, text in cores.items():
        (root / "node" / f"node{node}").mkdir(parents=True)
        (root / "node" / f"node{node}" / "cpulist").write_text(f"{text}\n")
    return root / "pci", root / "node"


def plan(gpus: int, roots: tuple[Path, Path], allowed: range) -> list[list[int]]:
    return numa.numa_plan(
        [Gpu(i, "x", f"g{i}") for i in range(gpus)], gpus, allowed, pci_root=roots[0], node_root=roots[1]
    )


def test_one_grace_cpu_a_gpu(tmp_path: Path) -> None:
    # Memory-only nodes (the GPUs' HBM) have no cores.
    roots = node_files(tmp_path, {"g0": 0, "g1": 1}, {0: "0-71", 1: "72-143", 2: "", 3: ""})
    assert plan(2, roots, range(144)) == [list(range(72)), list(range(72, 144))]
    # A cpuset that Slurm made: only cores of it.
    assert plan(2, roots, range(70, 74)) == [[70, 71], [72, 73]]


def test_gpus_that_share_a_socket_keep_hyperthreads_together(tmp_path: Path) -> None:
    roots = node_files(tmp_path, {"g0": 0, "g1": 0, "g2": 1, "g3": 1}, {0: "0-3,8-11", 1: "4-7,12-15"})
    assert plan(4, roots, range(16)) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]


def test_no_plan_without_knowledge(tmp_path: Path) -> None:
    roots = node_files(tmp_path, {"g0": -1, "g1": 0}, {0: "0-3"})
    assert plan(2, roots, range(4)) == []
    assert plan(1, (tmp_path / "x", tmp_path / "y"), range(4)) == []
    one = node_files(tmp_path / "one", {"g0": 0}, {0: "0-3"})
    assert plan(1, one, range(4)) == [], "all cores for the only worker is no binding"


def test_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    core = sorted(os.sched_getaffinity(0))[0]
    monkeypatch.setenv(numa.PLAN_VARIABLE, f"[[{core}]]")
    before = os.sched_getaffinity(0)
    try:
        assert numa.bind_numa(0) == [core]
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)
    assert numa.bind_numa(1) == []
    monkeypatch.setenv(numa.PLAN_VARIABLE, "[[99999]]")
    assert numa.bind_numa(0) == []
    monkeypatch.delenv(numa.PLAN_VARIABLE)
    assert numa.bind_numa(0) == []


def test_cache_key_differs_by_each_part_and_is_a_file_name() -> None:
    parts = {
        "torch": "2.14.1",
        "triton": "3.8",
        "cuda": "13.0",
        "gpu": "NVIDIA H200 / PCIe",
        "arch": "x86_64",
    }
    keys = {caches.cache_key(**{**parts, name: "other"}) for name in parts} | {caches.cache_key(**parts)}
    assert len(keys) == 6
    assert "/" not in caches.cache_key(**parts)


def test_cache_candidates() -> None:
    assert caches.cache_root(Path("/x"), {"HOME": "/h"}, 5) == [Path("/x")]
    assert caches.cache_root(None, {"XDG_CACHE_HOME": "/c", "HOME": "/h"}, 5)[0] == Path("/c/hiera-train")
    assert caches.cache_root(None, {"HOME": "/h"}, 5)[0] == Path("/h/.cache/hiera-train")
    assert caches.cache_root(None, {}, 5)[0].name == "hiera-train-cache-5"


def test_probe_leaves_nothing(tmp_path: Path) -> None:
    assert caches.probe(tmp_path / "a" / "b") is None
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_unusable_cache_names_field_and_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"runtime\.cache_dir: .*file cannot be made"):
        caches.prepare_cache(tmp_path / "file", "key", {}, os.getuid())


def test_fallback_when_home_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    directory, notes = caches.prepare_cache(None, "key", {"HOME": str(tmp_path / "home")}, 7)
    assert directory == tmp_path / "hiera-train-cache-7" / "key"
    assert len(notes) == 1


def test_noexec_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("service.launch.caches.subprocess.run", refuse)
    assert "noexec" in (caches.probe(tmp_path) or "")
