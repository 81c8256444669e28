"""The parts of the image that are Python, without an image: entry point, health check, gathered wheels, build.sh."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from service.errors import UserError
from tests.image.conftest import DOCKER, load

container = load("container")
health = load("health")
local_wheels = load("local_wheels")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is mounted at /data; not there yet."""
    folder = tmp_path / "data"
    monkeypatch.setattr(container, "DATA", folder)
    return folder


def test_data_is_taken_from_the_mount(data: Path) -> None:
    with pytest.raises(UserError, match=r"no data is mounted; add -v FOLDER:.*/data:ro"):
        container.prepare(["config", "check", "base"])
    data.mkdir()
    given = ["--set", f"data.path={data}"]
    assert container.prepare(["config", "check", "base"]) == ["config", "check", "base", *given]
    assert container.prepare(["run", "--config=tiny", "--dry-run"]) == ["run", "--config=tiny", "--dry-run", *given]
    assert container.prepare(["--config", "tiny", "--dry-run"])[-2:] == given
    with pytest.raises(UserError, match=r"holds 0 .npy files"):
        container.prepare(["--config", "eeg-1d", "--dry-run"])
    (data / "windows.npy").touch()
    assert container.prepare(["--config", "eeg-1d", "--dry-run"])[-1] == f"data.path={data}/windows.npy"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["--version"],
        ["config", "schema"],
        ["submit", "--config", "base"],
        ["--config"],
        ["--config", "base", "--set", "no.such=1"],
        ["config", "show", "quickstart"],
        ["--config", "base", "--set", "data.kind=synthetic", "--dry-run"],
    ],
)
def test_other_arguments_are_left_alone(data: Path, arguments: list[str]) -> None:
    assert container.prepare(list(arguments)) == arguments


def test_data_that_is_named_but_not_mounted(data: Path) -> None:
    for path, mount in ((data / "train", data), (Path("/elsewhere/train"), "/elsewhere/train")):
        with pytest.raises(UserError, match=rf"{path} is not in the container; mount it: -v FOLDER:{mount}:ro"):
            container.prepare(["--config", "base", "--set", f"data.path={path}", "--dry-run"])


def test_configuration_that_is_not_mounted() -> None:
    with pytest.raises(
        UserError, match=r"(?s)no configuration mine.yaml.*-v FOLDER:/config:ro, --config /config/mine.yaml"
    ):
        container.prepare(["--config", "mine.yaml"])


@pytest.mark.parametrize(
    ("files", "limit", "kills"),
    [
        ({"memory.max": "536870912\n", "memory.events": "low 0\noom 3\noom_kill 2\n"}, 536870912, 2),
        ({"memory.max": "max\n", "memory.events": "oom_kill 0\n"}, None, 0),
        (
            {"memory/memory.limit_in_bytes": "1024\n", "memory/memory.oom_control": "under_oom 0\noom_kill 1\n"},
            1024,
            1,
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None, 0),
        ({}, None, 0),
    ],
)
def test_control_groups(tmp_path: Path, files: dict[str, str], limit: int | None, kills: int) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="ascii")
    assert container.memory_limit(tmp_path) == limit
    assert container.memory_kills(tmp_path) == kills


def test_memory_is_named_after_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kills = iter((1, 2, 2, 2))
    monkeypatch.setattr(container, "memory_kills", lambda root: next(kills))
    monkeypatch.setattr(container, "memory_limit", lambda root: 700 * container.MIB)
    monkeypatch.setattr(container.cli, "main", lambda arguments: 1)
    assert container.main(["--version"]) == 1
    assert "raise --memory (now 700 MiB)" in capsys.readouterr().err
    assert container.main(["--version"]) == 1
    assert capsys.readouterr().err == ""


def test_health_finds_the_listening_socket() -> None:
    assert health.address("0100007F:2328") == ("127.0.0.1", 9000)
    assert health.address("00000000:24B8") == ("127.0.0.1", 9400)
    assert health.address("00000000000000000000000000000000:24B8") == ("::1", 9400)
    assert health.address("00000000000000000000000001000000:24B8") == ("::1", 9400)
    assert health.address("0000000000000000FFFF00000100007F:24B8") == ("127.0.0.1", 9400)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        assert place in list(health.endpoints(Path("/proc/self")))
        with socket.create_connection(place):
            assert list(health.endpoints(Path("/proc/self"))).count(place) == 1


def test_health_of_an_endpoint_that_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
    healthy, text = health.ask(*place)
    assert not healthy
    assert "does not answer" in text


def test_wheels_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local index and a folder of links; only files whose hash is locked, once."""
    index, links, target = tmp_path / "simple", tmp_path / "links", tmp_path / "target"
    (index / "my-package").mkdir(parents=True)
    links.mkdir()
    wheel = tmp_path / "My_Package-1.0-py3-none-any.whl"
    wheel.write_bytes(b"right")
    (links / wheel.name).write_bytes(b"right")
    (links / "my_package-1.0-cp311-none-any.whl").write_bytes(b"wrong")
    (links / "other-1.0-py3-none-any.whl").write_bytes(b"right")
    (index / "my-package" / "index.html").write_text(f'<a href="../../{wheel.name}">x</a>', encoding="utf-8")
    digest = hashlib.sha256(b"right").hexdigest()
    lock = tmp_path / "my.lock"
    lock.write_text(f"my-package==1.0 \\\n    --hash=sha256:{digest}\n    # via -r x\n", encoding="utf-8")
    configuration = {"find-links": [str(links)], "extra-index-url": [f"file://{index}", "proto://host/simple"]}
    monkeypatch.setattr(local_wheels, "settings", lambda: configuration)
    gathered = local_wheels.gather(target, [lock])
    assert [file.name for file in gathered] == [wheel.name]
    page = (target / "simple" / "my-package" / "index.html").read_text(encoding="utf-8")
    assert page.count("href") == 1
    assert f"#sha256={digest}" in page


def test_settings_for_the_build_name_no_local_folder() -> None:
    text = local_wheels.pip_conf(
        {
            "index-url": ["proto://host/simple"],
            "extra-index-url": ["file:///srv/simple", "proto://other/simple"],
            "find-links": ["/srv/wheels"],
            "cert": ["/etc/mine.pem"],
            "timeout": ["60"],
        }
    )
    assert "index-url = proto://host/simple" in text
    assert "extra-index-url = proto://other/simple" in text
    assert "/srv" not in text
    assert "cert = /run/secrets/ca" in text
    assert "timeout = 60" in text


@pytest.fixture
def engines(tmp_path: Path) -> dict[str, str]:
    """docker and buildah that write down their arguments; both answer."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("docker", "buildah"):
        script = f'#!/bin/sh\n[ "$1" = info ] || echo {name} "$@" >>{tmp_path}/calls\n'
        (programs / name).write_text(script, encoding="utf-8")
        (programs / name).chmod(0o755)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}


def build(engines: dict[str, str], tmp_path: Path, *options: str, **variables: str) -> str:
    """The engine's call that build.sh ends with."""
    # pip's settings of this machine have no part in it, and neither have its wheels.
    environment = {**engines, **variables, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    subprocess.run([DOCKER / "build.sh", *options], check=True, env=environment, capture_output=True, timeout=60)
    return (tmp_path / "calls").read_text(encoding="utf-8").splitlines()[-1]


def test_build_for_both_architectures(engines: dict[str, str], tmp_path: Path) -> None:
    both = {"PLATFORM": "linux/amd64,linux/arm64", "IMAGE": "place/hiera-train:1", "BASE_IMAGE": "debian:bookworm-slim"}
    call = build(engines, tmp_path, "--push", **both)
    assert call.startswith("docker buildx build ")
    assert "--platform linux/amd64,linux/arm64" in call
    assert "--tag place/hiera-train:1" in call
    assert "--push" in call
    call = build(engines, tmp_path, ENGINE="buildah", **both)
    assert call.startswith("buildah build --format docker ")
    assert "--manifest place/hiera-train:1" in call
    assert "--tag" not in call


def test_build_for_both_architectures_on_bases_made_here(engines: dict[str, str], tmp_path: Path) -> None:
    """Each architecture on its own base; then both under one name."""
    # A debootstrap that is not called: the bases exist, says the pretended buildah.
    both = {"PLATFORM": "linux/amd64,linux/arm64", "IMAGE": "hiera-train:1", "BASE_IMAGE": "debootstrap"}
    build(engines, tmp_path, ENGINE="buildah", **both)
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    builds = [call for call in calls if call.startswith("buildah build ")]
    for arch, call in zip(("amd64", "arm64"), builds, strict=True):
        assert f"BASE_IMAGE=localhost/hiera-base:bookworm-{arch}" in call
        assert f"--platform linux/{arch}" in call
        assert f"--tag hiera-train:1-{arch}" in call
    assert calls[-3:] == [
        "buildah manifest create hiera-train:1",
        "buildah manifest add hiera-train:1 hiera-train:1-amd64",
        "buildah manifest add hiera-train:1 hiera-train:1-arm64",
    ]


def test_build_on_another_base(engines: dict[str, str], tmp_path: Path) -> None:
    call = build(engines, tmp_path, BASE_IMAGE="nvidia/pytorch:x", TORCH="base")
    assert "--build-arg BASE_IMAGE=nvidia/pytorch:x" in call
    assert "--build-arg TORCH=base" in call
    assert "apt-sources" not in call
    assert "--platform" not in call


def test_build_without_an_engine(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "env", "id"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    answer = subprocess.run(
        ["/bin/bash", DOCKER / "build.sh"], env={"PATH": str(programs)}, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    assert "neither docker (with its engine running) nor buildah" in answer.stderr


def test_health_script_needs_nothing_but_python(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-I", "-S", DOCKER / "health.py"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    # There may be a run on this machine; the answer then is about it.
    assert answer.stdout
    assert answer.stderr == ""
