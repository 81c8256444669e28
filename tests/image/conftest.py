"""Fixtures of the tests of the image."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.image.podman import IMAGE, Volumes, podman

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def load(name: str) -> ModuleType:
    """A script of docker/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docker_{name}", DOCKER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def image() -> dict[str, Any]:
    """What podman says about the image."""
    answer = podman("image", "inspect", IMAGE, check=False)
    assert answer.returncode == 0, f"{IMAGE} is not here; docker/build.sh makes it"
    facts: dict[str, Any] = json.loads(answer.stdout)[0]
    return facts


@pytest.fixture
def volumes(image: dict[str, Any]) -> Iterator[Volumes]:
    """Named volumes for /runs and /cache, removed afterwards."""
    made = Volumes()
    yield made
    made.remove()
