"""A run whose output goes nowhere: closed descriptors, a reader that has left, a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.launch.state import read_state

SETTINGS = {
    "run.seed": 1,
    "model.input_size": "32,32",
    "model.embed_dim": 8,
    "model.stages": "1,1",
    "model.q_pool": 1,
    "model.mask_unit_size": "2,2",
    "model.mask_unit_attn": "true,false",
    "model.decoder_embed_dim": 8,
    "model.decoder_depth": 1,
    "model.decoder_num_heads": 1,
    "data.kind": "synthetic",
    "data.synthetic_samples": 64,
    "optim.warmup_epochs": 0,
    "train.global_batch": 4,
    "train.steps": 4,
    "train.epochs": "null",
    "train.log_every": 1,
    "runtime.device": "cpu",
    "runtime.nproc_per_node": 1,
    "runtime.threads": 1,
    "runtime.max_restarts": 0,
    "metrics.host": "127.0.0.1",
    "metrics.port": 0,
}


def closed() -> dict[str, Any]:
    return {"preexec_fn": lambda: os.closerange(0, 3)}


def reader_gone() -> dict[str, Any]:
    reader, writer = os.pipe()
    os.close(reader)
    return {"stdout": writer, "stderr": writer}


def disk_full() -> dict[str, Any]:
    full = os.open("/dev/full", os.O_WRONLY)
    return {"stdout": full, "stderr": full}


@pytest.mark.parametrize("output", [closed, reader_gone, disk_full])
def test_training_goes_on_and_the_exit_code_is_its_own(tmp_path: Path, output: Callable[[], dict[str, Any]]) -> None:
    fixed = {"run.dir": tmp_path / "run", "runtime.cache_dir": tmp_path / "cache"}
    settings = (SETTINGS | fixed).items()
    flags = ["--config=tiny", *(f"--set={name}={value}" for name, value in settings)]
    streams = output()
    done = subprocess.run([sys.executable, "-m", "service", *flags], timeout=120, check=False, **streams)
    for number in {value for value in streams.values() if isinstance(value, int)}:
        os.close(number)
    state = read_state(tmp_path / "run", 0)
    assert state is not None
    assert (state.status, state.step, done.returncode) == ("finished", 4, 0)


@pytest.mark.parametrize("output", [closed, reader_gone, disk_full])
def test_an_error_keeps_its_exit_code(output: Callable[[], dict[str, Any]]) -> None:
    streams = output()
    done = subprocess.run([sys.executable, "-m", "service", "--set=train.steps=0"], check=False, **streams)
    for number in {value for value in streams.values() if isinstance(value, int)}:
        os.close(number)
    assert done.returncode == 78


def test_closed_descriptors_are_opened_before_anything_can_take_their_numbers() -> None:
    code = (
        "import os, sys; from service import streams; streams.open_standard_files();"
        "assert [os.readlink(f'/proc/self/fd/{n}') for n in range(3)] == ['/dev/null'] * 3;"
        "assert all(map(os.get_inheritable, range(3))); print('x'); print('y', file=sys.stderr); streams.settle()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, **closed()).returncode == 0
