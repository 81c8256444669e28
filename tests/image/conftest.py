"""Fixtures of the tests of the image."""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.image.podman import IMAGE, Volumes, podman, sweep

DOCKER = Path(__file__).resolve().parents[2] / "docker"
MEASURED = "measured"


def load(name: str) -> ModuleType:
    """A script of docker/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docker_{name}", DOCKER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def image() -> Iterator[dict[str, Any]]:
    """What podman says about the image."""
    answer = podman("image", "inspect", IMAGE, check=False)
    assert answer.returncode == 0, f"{IMAGE} is not in podman's storage; ENGINE=buildah docker/build.sh makes it"
    facts: dict[str, Any] = json.loads(answer.stdout)[0]
    # TERM, as from a CI that gives up, ends the tests as Ctrl-C does: containers train on if nobody removes them.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield facts
    signal.signal(signal.SIGTERM, before)
    sweep()


@pytest.fixture
def volumes(image: dict[str, Any]) -> Iterator[Volumes]:
    """Named volumes for /runs and /cache, removed afterwards."""
    made = Volumes()
    yield made
    made.remove()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty small pictures that anybody can read."""
    folder = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(0)
    for index in range(30):
        Image.fromarray(numbers.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    for place in (folder, *folder.parents[:2]):
        place.chmod(0o755)
    return folder


TINY: dict[str, dict[str, Any]] = {
    "model": {
        "input_size": [64, 64],
        "embed_dim": 16,
        "stages": [1, 1],
        "q_pool": 1,
        "mask_unit_size": [2, 2],
        "mask_unit_attn": [True, False],
        "decoder_embed_dim": 16,
        "decoder_depth": 1,
        "decoder_num_heads": 2,
    },
    "data": {"kind": "images", "threads": 1},
    "optim": {"warmup_epochs": 0, "warmup_steps": 1},
    "train": {"global_batch": 4, "steps": 3, "epochs": None, "log_every": 1},
    "runtime": {"device": "cpu"},
}
"""A run of seconds on folders of pictures."""


def write_config(path: Path, *changes: dict[str, Any]) -> Path:
    """A configuration file, TINY with changes, that anybody can read."""
    sections: dict[str, Any] = {}
    for change in (TINY, *changes):
        merge(sections, change)
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    path.chmod(0o644)
    path.parent.chmod(0o755)
    return path


def merge(into: dict[str, Any], change: dict[str, Any]) -> None:
    """Put the fields of `change` into `into`, sections into sections."""
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(into.setdefault(name, {}), dict):
            merge(into[name], value)
        else:
            into[name] = value


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Takes a line about something that was measured; the lines are printed at the end of the tests."""
    return lambda line: record_property(MEASURED, line)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the tests measured."""
    reports = terminalreporter.getreports("passed")
    lines = [str(value) for report in reports for name, value in report.user_properties if name == MEASURED]
    if lines:
        terminalreporter.section("measured")
        for line in dict.fromkeys(lines):
            terminalreporter.write_line(line)
