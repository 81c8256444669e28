"""Runs of a tiny model in real worker processes, for the tests of this folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from service.config.load import dump_config
from service.config.schema import (
    CheckpointSection,
    DataSection,
    ModelSection,
    OptimSection,
    RunConfig,
    RunSection,
    RuntimeSection,
    TrainSection,
)
from service.train.checkpoint import list_checkpoints, load_tensors, verify

TINY = ModelSection(
    input_size=(64, 64),
    embed_dim=8,
    stages=(1, 1, 1, 1),
    decoder_embed_dim=16,
    decoder_depth=1,
    decoder_num_heads=2,
    drop_path_rate=0.1,
)


def make_config(
    *,
    model: ModelSection = TINY,
    data: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
) -> RunConfig:
    """A run of some seconds on the CPU; the arguments change its sections."""
    settings = {"kind": "synthetic", "synthetic_samples": 40, "threads": 1, "prefetch": 2, "val_fraction": 0.1}
    steps = {"global_batch": 4, "steps": 12, "log_every": 4, "eval_every": 6, "eval_samples": 6}
    return RunConfig(
        run=RunSection(seed=3),
        model=model,
        data=DataSection(**settings | (data or {})),
        optim=OptimSection(**{"lr": 1e-3, "warmup_steps": 3, "clip_grad_norm": 1.0} | (optim or {})),
        train=TrainSection(**steps | (train or {})),
        checkpoint=CheckpointSection(**{"every_steps": 3} | (checkpoint or {})),
        runtime=RuntimeSection(device="cpu", collective_timeout_seconds=60),
    )


def make_run(folder: Path, config: RunConfig) -> Path:
    """A run directory with its run.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    return folder


def start(folder: Path, ranks: int = 1, attempt: str = "test") -> subprocess.Popen[str]:
    """Starts the workers of a run: one process, or torchrun with several."""
    command = [sys.executable, "-m", "service.train", "--run-dir", str(folder)]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        torchrun += ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGUSR2"]
        command = [sys.executable, *torchrun, *command[1:]]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HIERA_RUN_DIR": str(folder),
        "HIERA_ATTEMPT": attempt,
        "PYTHONWARNINGS": "ignore",
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], timeout: float = 90) -> tuple[int, str]:
    """Exit code and output; kills the processes when they take too long."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{output}") from None
    return process.returncode, output


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks: the process itself, or torchrun's children."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children] or [process.pid]


def wait_for_step(folder: Path, step: int, timeout: float = 60) -> None:
    """Waits until a checkpoint of at least this step is there."""
    deadline = time.monotonic() + timeout
    while not any(saved >= step for saved, _ in list_checkpoints(folder / "checkpoints")):
        assert time.monotonic() < deadline, f"no checkpoint of step {step} after {timeout} s"
        time.sleep(0.02)


def state_of(folder: Path) -> dict[str, Any]:
    """What the workers wrote at the end."""
    state: dict[str, Any] = json.loads((folder / "state" / "node-0.json").read_text())
    return state


def events_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    clock = {"time", "samples_per_second", "data_wait_seconds"}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the newest checkpoint, which has to be whole."""
    _, path = list_checkpoints(folder / "checkpoints")[-1]
    verify(path)
    return load_tensors(path)


def assert_same(one: Path, other: Path) -> None:
    """The runs ended with the same bits and the same record."""
    first, second = final_tensors(one), final_tensors(other)
    assert first.keys() == second.keys()
    different = [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    assert different == []
    assert events_of(one) == events_of(other)
