"""The Job's pod template for real: podman plays the pods that the Job controller would make of it.

Needs root, podman with runc, and the image (docker/build.sh). What a cluster adds is added here: the
completion index as an annotation, a host name a pod, and the headless Service's names as host aliases.
"""

from __future__ import annotations

import copy
import os
import resource
import secrets
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from service.cluster import kubernetes, kustomize
from service.cluster.job import make_job
from service.config.load import load_config
from tests.system.slurm_host import completed, wait_for

IMAGE = os.environ.get("HIERA_IMAGE", "localhost/hiera-train:latest")
PODMAN = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs")


def image_is_here() -> bool:
    if os.geteuid() or any(shutil.which(name) is None for name in ("podman", "runc")):
        return False
    return subprocess.run(["podman", "image", "exists", IMAGE], check=False).returncode == 0


pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not image_is_here(), reason=f"needs root, podman, runc and the image {IMAGE}"),
]


def podman_environment(directory: Path) -> dict[str, str]:
    """Environment in which podman's defaults for limits are not above what containers may have here."""
    limits = [
        f"{name}={min(resource.getrlimit(kind)[1], most)}:{min(resource.getrlimit(kind)[1], most)}"
        for name, kind, most in (
            ("nofile", resource.RLIMIT_NOFILE, 1 << 20),
            ("nproc", resource.RLIMIT_NPROC, int(Path("/proc/sys/kernel/pid_max").read_text())),
        )
    ]
    # Neither `kube play` nor the service of Docker's API has an option for them.
    (directory / "containers.conf").write_text(f"[containers]\ndefault_ulimits = {limits}\n")
    return {**os.environ, "CONTAINERS_CONF": str(directory / "containers.conf")}


class Player:
    """Pods of a job under podman, in a network of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token = secrets.token_hex(3)
        self.network = f"hiera-{self.token}"
        self.subnet = f"10.{201 + int(self.token[:2], 16) % 50}.{int(self.token[2:4], 16)}"
        self.files: list[Path] = []
        self.environment = podman_environment(directory)
        self.podman("network", "create", "--subnet", f"{self.subnet}.0/24", self.network)

    def podman(self, *arguments: str, check: bool = True) -> str:
        """Output of podman."""
        # conmon leaves files of its own in the directory
        done = completed([*PODMAN, *arguments], self.directory, self.environment)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def play(self, nodes: int, *settings: str) -> list[str]:
        """Start the pods of the smoke overlay's job; returns the names of their containers."""
        name = f"kube-{self.token}"
        overlay = kustomize.OVERLAYS["cpu-smoke"][1]
        given = (f"cluster.image={IMAGE}", "runtime.threads=1", "cluster.kubernetes.run_as_user=54321")
        job = make_job(load_config("base", [*overlay, *given, *settings]), nodes=nodes, name=name)
        manifests = {manifest["kind"]: manifest for manifest in kubernetes.manifests(job)}
        template = manifests["Job"]["spec"]["template"]
        service = manifests["Service"]["metadata"]["name"]
        addresses = [f"{self.subnet}.{10 + index}" for index in range(nodes)]
        for index, address in enumerate(addresses):
            pod = copy.deepcopy(template)
            annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
            pod["metadata"].update(name=f"{name}-{index}", annotations=annotations)
            pod["spec"]["hostAliases"] = [
                {"ip": other, "hostnames": [f"{name}-{number}.{service}"]} for number, other in enumerate(addresses)
            ]
            # podman opens them on this machine, where they collide.
            del pod["spec"]["containers"][0]["ports"]
            documents = [manifests["ConfigMap"], {"apiVersion": "v1", "kind": "Pod", **pod}]
            file = self.directory / f"pod-{index}.yaml"
            file.write_text(yaml.safe_dump_all(documents))
            self.files.append(file)
            where = f"{self.network}:ip={address}"
            self.podman("kube", "play", "--network", where, "--log-driver", "k8s-file", str(file))
        return [f"{name}-{index}-{kubernetes.CONTAINER}" for index in range(nodes)]

    def wait(self, container: str) -> int:
        """Exit code of a container."""
        inspect = ("inspect", container, "--format", "{{.State.Status}} {{.State.ExitCode}}")
        wait_for(lambda: self.podman(*inspect).startswith("exited"), f"for {container}")
        return int(self.podman(*inspect).split()[1])

    def close(self) -> None:
        """Remove pods, volumes and the network."""
        for file in self.files:
            self.podman("kube", "down", str(file), check=False)
        # The ConfigMap's.
        self.podman("volume", "rm", "-f", f"kube-{self.token}", check=False)
        self.podman("network", "rm", "-f", self.network, check=False)


@pytest.fixture
def player(tmp_path):
    made = Player(tmp_path)
    yield made
    made.close()


def test_one_pod_trains_to_the_end_as_restricted_as_the_template_says(player):
    (container,) = player.play(1)
    assert player.wait(container) == 0, player.podman("logs", container)
    assert "finished at step 50" in player.podman("logs", container)
    form = "{{.HostConfig.ReadonlyRootfs}} {{.Config.User}} {{.EffectiveCaps}}"
    assert player.podman("inspect", container, "--format", form).split() == ["true", "54321:54321", "[]"]


def test_two_pods_find_each_other(player):
    containers = player.play(2)
    assert [player.wait(container) for container in containers] == [0, 0]
    for index, container in enumerate(containers):
        text = player.podman("logs", container)
        assert f"node {index} of 2, address {player.subnet}.{10 + index}" in text
        assert "finished at step 50" in text


def test_a_pod_that_is_deleted_saves_and_says_so(player):
    (container,) = player.play(1, "train.steps=100000", "train.log_every=10")
    wait_for(lambda: "step 10/" in player.podman("logs", container), "for the first steps")
    player.podman("stop", "--time", "60", container)
    assert player.wait(container) == 75, player.podman("logs", container)
    assert "stopped at step" in player.podman("logs", container)


def test_a_wrong_configuration_ends_with_the_code_that_fails_the_job(player):
    (container,) = player.play(1, "data.kind=array", "data.path=/data/nothing.npy")
    assert player.wait(container) == 78, player.podman("logs", container)
    assert "/data/nothing.npy" in player.podman("logs", container)
