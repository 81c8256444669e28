"""The files that make the image: linted, free of this or that machine's settings, and locked for both architectures."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.image.conftest import DOCKER

ROOT = DOCKER.parent
LOCKS = sorted(DOCKER.glob("requirements-*.lock"))
ARCHITECTURES = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
PYTHONS = ("3.11", "3.12")
"""Debian bookworm's, and that of Ubuntu 24.04, which NVIDIA's bases are made from."""


def tool(name: str) -> str:
    """Path of a program that the development requirements bring; a missing one is a failure, not a skip."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, f"{name} is missing: pip install 'hiera-train[dev]'"
    return found


def locked() -> dict[str, dict[str, set[str]]]:
    """Versions and their hashes, by package."""
    packages: dict[str, dict[str, set[str]]] = {}
    for file in LOCKS:
        hashes: set[str] = set()
        for line in file.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"(\S+)==(\S+)", line):
                hashes = packages.setdefault(match.group(1), {}).setdefault(match.group(2), set())
            hashes.update(re.findall(r"--hash=(sha256:\w{64})", line))
    return packages


def test_hadolint() -> None:
    answer = subprocess.run([tool("hadolint"), DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout


def test_shellcheck() -> None:
    scripts = [*sorted(DOCKER.glob("*.sh")), DOCKER.parent / "tests/image/preflight.sh"]
    assert len(scripts) >= 6
    answer = subprocess.run([tool("shellcheck"), *scripts], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout


def test_no_registry_or_machine_in_the_build() -> None:
    files = [DOCKER / "Dockerfile", *LOCKS, *DOCKER.glob("*.in"), *DOCKER.glob("*.sh"), *DOCKER.glob("*.py")]
    for file in files:
        text = file.read_text(encoding="utf-8")
        for word in re.findall(r"[a-z0-9.-]+\.(?:io|org|com|net)\b(?!\.image)", text):
            # OCI labels are reversed domain names.
            assert word.startswith("org.opencontainers"), f"{file.name}: {word}"
        assert not re.search(r"index-url|trusted-host", text) or file.suffix in (".py", ".sh")


def test_dockerignore_lets_through_what_is_copied_and_nothing_else() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in rules
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    copied: set[str] = set()
    for line in re.findall(r"^COPY (.*)$", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE):
        words = [word for word in line.split() if not word.startswith("--")]
        if "--from" not in line:
            copied.update(word.rstrip("*") for word in words[:-1])
    assert all((ROOT / name).exists() for name in copied - {"README.md"})
    covered = {name for name in copied if name in allowed or any(Path(name).match(rule) for rule in allowed)}
    assert covered == copied
    assert all(any(Path(name).match(rule) for name in copied) for rule in allowed)


def test_every_package_is_locked_with_hashes() -> None:
    packages = locked()
    for name, versions in packages.items():
        for version, hashes in versions.items():
            assert hashes, f"{name} {version} has no hash"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["quickstart"]):
        requirement = Requirement(text)
        versions = packages.get(canonicalize_name(requirement.name), {})
        assert versions, f"{requirement.name} is not locked: docker/lock.sh"
        assert all(requirement.specifier.contains(version) for version in versions), f"{text}: {set(versions)}"


@pytest.mark.system
def test_locks_are_what_lock_sh_makes(tmp_path: Path) -> None:
    """Inputs, locks and the index agree: versions to the letter, and the index has each hash."""
    for file in LOCKS:
        # Without hashes, or uv would take them over instead of asking for them.
        lines = file.read_text(encoding="utf-8").replace(" \\\n", "\n").splitlines(keepends=True)
        (tmp_path / file.name).write_text("".join(line for line in lines if "--hash" not in line), encoding="utf-8")
    subprocess.run(
        [DOCKER / "lock.sh"],
        check=True,
        timeout=600,
        env={**os.environ, "UV": tool("uv"), "HIERA_LOCK_DIR": str(tmp_path)},
    )
    for file in LOCKS:
        made, kept = ((place / file.name).read_text(encoding="utf-8") for place in (tmp_path, DOCKER))
        assert without_hashes(made) == without_hashes(kept), f"{file.name} is stale: docker/lock.sh"
        unknown = set(re.findall(r"sha256:\w{64}", kept)) - set(re.findall(r"sha256:\w{64}", made))
        assert not unknown, f"{file.name}: not in the index: {unknown}"


def without_hashes(text: str) -> list[str]:
    """Lines of a lock but for the hashes: a release may get another wheel later."""
    return [line.rstrip(" \\") for line in text.splitlines() if "--hash" not in line]


@pytest.mark.system
@pytest.mark.parametrize("version", PYTHONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_locks_resolve(architecture: str, version: str, tmp_path: Path) -> None:
    """What is locked is complete and comes as wheels on both architectures; only metadata is downloaded."""

    def resolve(*names: str, options: tuple[str, ...] = ()) -> str:
        lock = tmp_path / "lock.txt"
        text = "".join((DOCKER / f"requirements-{name}.lock").read_text(encoding="utf-8") for name in names)
        lock.write_text(text, encoding="utf-8")
        command = [
            *(tool("uv"), "pip", "install", "--dry-run", "--no-build", "--require-hashes", "--no-cache"),
            *("--python-platform", architecture, "--python-version", version, *options),
            *("--target", str(tmp_path / "target"), "--requirements", str(lock)),
        ]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert answer.returncode == 0, answer.stderr
        return answer.stderr

    # Of two packages the photographs are taken, so that their requirements are not in the lock.
    resolve("photographs", options=("--no-deps",))
    resolve("build")
    output = resolve("torch", "app")
    for name in ("torch==", "triton==", "nvidia-nccl-cu13==", "nvidia-cudnn-cu13==", "hiera-transformer=="):
        assert f" + {name}" in output
