"""What is in the image, and what is not; compilers and caches as the user of a hardened container."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sysconfig
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.image.conftest import DOCKER
from tests.image.podman import HARDENED, IMAGE, Container, Volumes, podman, python, run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(3000)]

MAX_ADDED_MB = 400
"""What the image may weigh beyond torch's wheels and what these require."""

COMPILE = """
import json, os, time, torch
from torch._dynamo.utils import counters
begin = time.perf_counter()
function = torch.compile(lambda x: (x.sin() * x).sum(-1))
x = torch.randn(64, 96)
assert torch.allclose(function(x), (x.sin() * x).sum(-1), atol=1e-4)
hits = counters["inductor"]["fxgraph_cache_hit"]
print(json.dumps({"seconds": time.perf_counter() - begin, "hits": hits, "uid": os.getuid()}))
"""


@pytest.fixture(scope="module")
def tree(image: dict[str, Any]) -> Iterator[Path]:
    """The image's files, mounted on this machine."""
    yield Path(podman("image", "mount", IMAGE).stdout.strip())
    podman("image", "unmount", IMAGE)


def test_settings(image: dict[str, Any]) -> None:
    config = image["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["tini", "-g", "--", "hiera-train-container"]
    # podman's spelling of the key has changed over its versions.
    health = next(value for key, value in {**image, **config}.items() if key.lower() == "healthcheck" and value)
    assert health["Test"] == ["CMD", "hiera-train-health"]
    environment = dict(entry.split("=", 1) for entry in config["Env"])
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    # Secrets and settings of the machine that built it would be here if anywhere.
    assert set(environment) == {
        *("PATH", "HOME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "XDG_CACHE_HOME"),
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    }
    labels = config["Labels"]
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert labels["org.opencontainers.image.version"] == project["version"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", labels["org.opencontainers.image.revision"])
    assert "9400/tcp" in config["ExposedPorts"]


def test_version_and_help(image: dict[str, Any]) -> None:
    assert run("--version").stdout.startswith("hiera-train ")
    assert "--config" in run().stdout


def test_nothing_is_world_writable_but_the_volumes(tree: Path) -> None:
    found = subprocess.run(
        ["find", str(tree), "-xdev", "-perm", "-0002", "!", "-type", "l", "!", "-type", "c"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert sorted("/" + str(Path(path).relative_to(tree)) for path in found) == ["/cache", "/runs", "/tmp"]


def test_no_build_tools_caches_or_settings_are_left(tree: Path) -> None:
    packages = next((tree / "opt/venv/lib").glob("python3.*/site-packages"))
    assert not list(packages.glob("pip*"))
    assert not list(packages.glob("wheel*"))
    apt = ("var/lib/apt/lists", "var/cache/apt/archives", "etc/apt/sources.list.d")
    for empty in (*apt, "run/secrets", "tmp", "root"):
        # What a base brings as a matter of course (.bashrc) is no cache.
        left = [path.name for path in (tree / empty).rglob("*") if path.is_file() and path.stat().st_size]
        assert [name for name in left if name not in (".bashrc", ".profile", "lock")] == []
    assert not (tree / "etc/pip.conf").exists()
    assert not list((tree / "etc/apt/apt.conf.d").glob("*build*"))
    assert not (tree / "work").exists()


def test_size(image: dict[str, Any], measured: Callable[[str], None]) -> None:
    """The floor is torch's own: its wheels and what they require, as pip installs them."""
    code = (DOCKER.parent / "tests/image/measure.py").read_text(encoding="utf-8")
    total = image["Size"] / 1e6
    floor, left, others = (megabytes / 1e6 for megabytes in json.loads(python(code).stdout).values())
    measured(
        f"image {total:.0f} MB; torch's wheels {floor:.0f} MB, so {total - floor:.0f} MB more; "
        f"{floor - left:.0f} MB of the wheels left out, other packages {others:.0f} MB, "
        f"system and compilers {total - left - others:.0f} MB"
    )
    assert floor > 4000
    assert total - floor <= MAX_ADDED_MB


def test_pip_check(image: dict[str, Any]) -> None:
    """pip itself is not in the image: it is lent."""
    # Not `import pip`: to look for it makes setuptools leave distutils to the standard library in this process.
    folder = Path(sysconfig.get_path("purelib")) / "pip"
    assert folder.is_dir()
    answer = run(
        *("-m", "pip", "check"),
        options=["--entrypoint", "python", "--env", "PYTHONPATH=/lent", f"--volume={folder}:/lent/pip:ro"],
    )
    # NVIDIA's cuSPARSELt for aarch64 names its platform `sbsa`, which pip does not know.
    known = "nvidia-cusparselt-cu13 0.8.1 is not supported on this platform"
    problems = [line for line in answer.stdout.splitlines() if line != known or platform.machine() != "aarch64"]
    assert problems in ([], ["No broken requirements found."]), answer.stdout + answer.stderr


def test_compilers_and_shared_cache(volumes: Volumes, measured: Callable[[str], None]) -> None:
    """Inductor compiles for the user of a hardened container; two at once on an empty cache; a third one reuses it."""
    options = [
        *HARDENED,
        *("--entrypoint", "python"),
        *("--env", "TORCHINDUCTOR_CACHE_DIR=/cache/inductor", "--env", "TRITON_CACHE_DIR=/cache/triton"),
        volumes("/cache"),
    ]
    with Container("-c", COMPILE, options=options) as first, Container("-c", COMPILE, options=options) as second:
        assert first.wait() == 0, first.logs()
        assert second.wait() == 0, second.logs()
        cold = json.loads(first.logs().splitlines()[-1])
    answer = run("-c", COMPILE, options=options)
    assert answer.returncode == 0, answer.stderr
    warm = json.loads(answer.stdout.splitlines()[-1])
    measured(f"compiling: {cold['seconds']:.1f} s with an empty cache, {warm['seconds']:.1f} s with a filled one")
    assert cold["uid"] == warm["uid"] == 54321
    assert warm["hits"] == 1
    # Triton builds a C extension against Python.h for its driver; the same is done here without a GPU.
    source = "#include <Python.h>\\nint main(void) { Py_Initialize(); return 0; }"
    flags = "$(python3-config --includes --embed --ldflags)"
    build = f"printf '{source}' | gcc -x c - -o /cache/probe {flags} && /cache/probe"
    answer = run("-c", build, options=[*HARDENED, "--entrypoint", "bash", volumes("/cache")])
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        (["setpriv", "--bounding-set=-net_admin"], "podman starts no container here (root needs"),
        (["setpriv", "--bounding-set=-sys_admin"], "CAP_SYS_ADMIN is missing"),
        (["setpriv", "--reuid=54321", "--clear-groups"], "need root"),
        (["env", "PREFLIGHT_SECONDS=0.01"], "no answer in 0.01 s"),
        (["env", "HIERA_IMAGE=localhost/none:none", "PREFLIGHT_GIB=100000"], "GiB free; building"),
        (["env"], None),
    ],
)
def test_preflight_says_what_a_machine_lacks(
    image: dict[str, Any], limits: list[str], line: str | None, tmp_path: Path
) -> None:
    """In one line, before the build."""
    script = tmp_path / "preflight.sh"
    script.write_bytes((DOCKER.parent / "tests/image/preflight.sh").read_bytes())
    for place in (tmp_path, *tmp_path.parents[:2], script):
        place.chmod(0o755)
    answer = subprocess.run([*limits, "bash", str(script)], capture_output=True, text=True, check=False, timeout=200)
    assert answer.returncode == (line is not None)
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == (line is not None)
    assert (line or "") in answer.stderr


def test_health_check_without_a_run(image: dict[str, Any]) -> None:
    options = ["--no-healthcheck", "--entrypoint", "sleep"]
    with Container("60", options=options) as container:
        wait_for(lambda: container.state()["Running"])
        assert "no run" in container.execute("hiera-train-health")
