"""`submit --on docker` for real: podman serves Docker's API, through which torchx starts the image."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from service.cluster import kustomize
from tests.system.slurm_host import completed, end, wait_for
from tests.system.slurm_runs import hiera_train
from tests.system.test_kube_play import IMAGE, PODMAN, image_is_here, podman_environment

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not image_is_here(), reason=f"needs root, podman, runc and the image {IMAGE}"),
]


class Engine:
    """An engine with Docker's API in a directory, and hiera-train as its client."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.handles: list[str] = []
        self.environment = podman_environment(directory)
        self.networks = self.podman("network", "ls", "--quiet").split()
        # A socket's path has to be short.
        socket = Path(self.podman("info", "--format", "{{.Store.RunRoot}}").strip()) / f"{directory.name[-20:]}.sock"
        self.environment["DOCKER_HOST"] = f"unix://{socket}"
        with (directory / "engine.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *PODMAN, "system", "service", "--time", "0", f"unix://{socket}"],
                env=self.environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.socket = socket
        wait_for(socket.exists, "for podman's service")

    def podman(self, *arguments: str) -> str:
        """Output of podman."""
        return completed([*PODMAN, *arguments], self.directory, self.environment).stdout

    def hiera(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """hiera-train with these arguments."""
        return completed(hiera_train(*arguments), self.directory, self.environment)

    def submit(self, *settings: str) -> str:
        """Submit the smoke overlay's run; returns the handle."""
        given = (*kustomize.OVERLAYS["cpu-smoke"][1], f"cluster.image={IMAGE}", "runtime.threads=1", *settings)
        words = [word for setting in given for word in ("--set", setting)]
        done = self.hiera("submit", "--on", "docker", "--config", "base", *words)
        assert done.returncode == 0, done.stderr
        self.handles.append(done.stdout.strip())
        return self.handles[-1]

    def exit_code(self, handle: str) -> str:
        """Exit code of a handle's container."""
        return self.podman(
            "inspect", handle.rsplit("/", 1)[-1] + "-trainer-0", "--format", "{{.State.ExitCode}}"
        ).strip()

    def close(self) -> None:
        """Remove what was submitted here, and the network if it is new, and end the engine."""
        try:
            for handle in self.handles:
                self.podman("rm", "--force", handle.rsplit("/", 1)[-1] + "-trainer-0")
            if "torchx" not in self.networks:
                self.podman("network", "rm", "torchx")
        finally:
            end(self.process)
            self.socket.unlink(missing_ok=True)


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_a_container_trains_to_the_end_and_what_it_writes_is_the_user_s(engine):
    handle = engine.submit()
    assert handle.startswith("local_docker://hiera-train/hiera-base-")
    followed = engine.hiera("logs", handle, "--follow")
    assert "finished at step 50" in followed.stdout, followed.stdout + followed.stderr
    wait_for(lambda: engine.hiera("status", handle).stdout.startswith(f"SUCCEEDED  {handle}\n"), "for the end")
    checkpoint = engine.directory / "runs/hiera-base/checkpoints/step-00000050.safetensors"
    assert checkpoint.owner() == engine.directory.owner()


def test_a_container_that_is_cancelled_saves(engine):
    handle = engine.submit("train.steps=100000")
    wait_for(lambda: "step 10/" in engine.hiera("logs", handle).stdout, "for the first steps")
    assert f"RUNNING    {handle}\n" in engine.hiera("list", "--on", "docker").stdout
    assert engine.hiera("cancel", handle).returncode == 0
    assert engine.exit_code(handle) == "75", engine.hiera("logs", handle).stdout
    assert list((engine.directory / "runs/hiera-base/checkpoints").glob("*.safetensors"))


def test_what_somebody_else_has_submitted_is_left_alone(engine, tmp_path):
    handle = engine.submit("train.steps=100000")
    (tmp_path / "another-engine").mkdir()
    another = Engine(tmp_path / "another-engine")
    try:
        assert handle in another.hiera("list", "--on", "docker").stdout
    finally:
        another.close()
    assert handle in engine.hiera("list", "--on", "docker").stdout
