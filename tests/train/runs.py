"""Runs of a tiny model in real worker processes, for the tests of this folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
from service.train.__main__ import main
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
    runtime: dict[str, Any] | None = None,
) -> RunConfig:
    """A run of some seconds on the CPU; the arguments change its sections."""
    settings = {"kind": "synthetic", "synthetic_samples": 40, "threads": 1, "prefetch": 2}
    steps = {"global_batch": 4, "steps": 12, "log_every": 4, "eval_every": 6, "eval_samples": 6}
    return RunConfig(
        run=RunSection(seed=3),
        model=model,
        data=DataSection(**settings | (data or {})),
        optim=OptimSection(**{"lr": 1e-3, "warmup_steps": 2, "clip_grad_norm": 1.0} | (optim or {})),
        train=TrainSection(**steps | (train or {})),
        checkpoint=CheckpointSection(**{"every_steps": 3} | (checkpoint or {})),
        runtime=RuntimeSection(**{"device": "cpu", "collective_timeout_seconds": 60} | (runtime or {})),
    )


def make_run(folder: Path, config: RunConfig) -> Path:
    """A run directory with its run.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    return folder


class Start:
    """One start of a run: a real process a rank, with its output in a file.

    The processes are forked from a server that has torch loaded, which saves some seconds each. `before` runs
    in each of them with its rank, to break something.
    """

    def __init__(self, folder: Path, ranks: int = 1, before: Callable[[int], None] | None = None) -> None:
        self.folder = folder
        descriptor, output = tempfile.mkstemp(suffix=".txt", prefix="hiera-train-")
        os.close(descriptor)
        self._output = Path(output)
        port = free_port() if ranks > 1 else 0
        attempt = self._output.stem
        self.processes = [
            CONTEXT.Process(target=_rank, args=(folder, rank, ranks, port, attempt, self._output, before))
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def kill(self) -> None:
        """kill -9 to every rank."""
        for process in self.processes:
            process.kill()
        self.finish()

    def signal(self, number: int, rank: int = 0) -> None:
        """Sends a signal to one rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_for_output(self, words: str, timeout: float = 60) -> None:
        """Waits until these words have been printed."""
        deadline = time.monotonic() + timeout
        while words not in self._output.read_text():
            assert time.monotonic() < deadline, f"no {words!r} after {timeout} s"
            time.sleep(0.02)

    def finish(self, timeout: float = 60) -> tuple[list[int | None], str]:
        """Exit codes of all ranks, and what they printed."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in self.processes if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        output = self._output.read_text()
        self._output.unlink()
        assert not late, f"still running after {timeout} s:\n{output}"
        return [process.exitcode for process in self.processes], output


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["service.train.loop", "hiera_optim.optim.muon"])


def _rank(
    folder: Path,
    rank: int,
    ranks: int,
    port: int,
    attempt: str,
    output: Path,
    before: Callable[[int], None] | None,
) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": port, "HIERA_RUN_DIR": folder, "HIERA_ATTEMPT": attempt}
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    sys.argv = ["service.train", "--run-dir", str(folder)]
    if before is not None:
        before(rank)
    code = main()
    sys.stdout.flush()
    sys.exit(code)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_to_end(folder: Path, ranks: int = 1) -> str:
    """Runs until finished; returns the output."""
    codes, output = Start(folder, ranks).finish()
    assert codes == [0] * ranks, output
    return output


def start_torchrun(folder: Path, ranks: int) -> subprocess.Popen[str]:
    """Starts the run under torchrun, in a process group of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HIERA_RUN_DIR": str(folder)}
    environment |= {"HIERA_ATTEMPT": f"torchrun-{time.monotonic_ns()}"}
    return subprocess.Popen(
        [*torchrun, "-m", "service.train", "--run-dir", str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of torchrun's workers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children]


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
