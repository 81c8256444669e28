"""Runs of the real image: what the README's Docker section promises, and what a cluster does to a container."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from tests.image.conftest import DOCKER, write_config
from tests.image.podman import HARDENED, SHORT, Container, Volumes, podman, run, wait_for
from tests.system.test_prometheus import free_port

# Seconds each on a quiet machine; the limits are for a machine that builds something else beside.
pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(3000)]

QUICKSTART = ("--config", "quickstart.yaml")
SITE = ("--tmpfs=/runs:mode=1777", "--tmpfs=/cache:mode=1777,exec", "--env=HOME=/root", "--no-healthcheck")
LONG = ("--set", "train.steps=100000", "--set", "train.log_every=5")


@pytest.fixture(scope="module")
def stuck(image: dict[str, Any]) -> Iterator[tuple[Container, float]]:
    """A container whose workers stand still, and since when: started first, judged last, while others run."""
    with Container(*QUICKSTART, *LONG, options=["--publish=127.0.0.1::9400"]) as container:
        container.wait_for_log("step 5/")
        assert "training" in container.execute("hiera-train-health")
        for pid, _, line in container.processes():
            if "--run-dir" in line and "service.launch.worker" in line and "agent" not in line:
                container.execute("bash", "-c", f"kill -STOP {pid}")
        wait_for(lambda: any(state == "T" for _, state, _ in container.processes()))
        yield container, time.monotonic()


def metric(port: int, name: str) -> float | None:
    """Value of a metric without further labels than the node's, None while it is not there."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name + "{"):
                return float(line.rpartition(" ")[2])
    return None


def steps(directory: Path) -> list[int]:
    """Steps of the run's log lines."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


def test_a_stuck_container_exists(stuck: tuple[Container, float]) -> None:
    """Here first, so that the two minutes that a run may stand still pass while the other tests run."""
    container, _ = stuck
    answer = podman("healthcheck", "run", container.name, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def memory_kills(container: Container) -> int:
    """Processes that the kernel has ended for want of memory; podman's OOMKilled stays false with Debian's conmon."""
    files = "/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
    text = container.execute("bash", "-c", f"cat {files} 2>/dev/null || true")
    (count,) = re.findall(r"^oom_kill (\d+)", text, re.MULTILINE)
    return int(count)


def test_stopped_and_resumed_in_a_new_container(volumes: Volumes, measured: Callable[[str], None]) -> None:
    """TERM inside a run, exit code 75 seen from outside; another container goes on from the volume. All of it as a
    stranger without rights, on a read-only root.
    """
    options = [*HARDENED, "--memory=1g", volumes("/runs"), volumes("/cache")]
    port = free_port()
    with Container(*QUICKSTART, *LONG, options=[*options, f"--publish=127.0.0.1:{port}:9400"]) as first:
        first.wait_for_log("step 5/")
        cold = metric(port, "hiera_time_to_first_step_seconds")
        assert not [row for row in first.processes() if row[1] == "Z"]
        assert memory_kills(first) == 0
        assert first.stop() == EXIT_STOPPED, first.logs()
        assert "stopped at step" in first.logs()
    runs = volumes.path("/runs") / "quickstart"
    before = steps(runs)
    assert (runs / "run.yaml").stat().st_uid == 54321
    # A second container finds the first one's directory, checkpoint and cache.
    end = str(before[-1] + 40)
    change = ("--set", f"train.steps={end}", "--set", "checkpoint.allow_changes=true", "--set", "train.log_every=5")
    with Container(*QUICKSTART, *change, options=[*options, f"--publish=127.0.0.1:{port}:9400"]) as second:
        warm = wait_for(lambda: metric(port, "hiera_time_to_first_step_seconds"))
        assert second.wait() == EXIT_FINISHED, second.logs()
    after = steps(runs)
    assert after[: len(before)] == before
    assert min(after[len(before) :]) > before[-1]
    assert after[-1] == int(end)
    measured(f"time to the first step: {cold:.1f} s in the first container, {warm:.1f} s in the second")


def test_what_apptainer_and_enroot_start(image: dict[str, Any]) -> None:
    """The definition's own lines, without an init, on a root that is read-only: TERM still saves and says 75."""
    text = (DOCKER / "hiera-train.def").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^%(\w+)\n((?:    .*\n|\n)+)", text, re.MULTILINE))
    assert set(sections) == {"environment", "runscript", "test"}
    assert sections["runscript"].split()[-3:] == ["exec", "/usr/local/bin/hiera-train-container", '"$@"']
    assert run("-c", sections["test"], options=["--entrypoint", "sh"]).stdout.startswith("hiera-train ")
    script = sections["environment"] + sections["runscript"]
    with Container("-c", script, "sh", *QUICKSTART, *LONG, options=[*HARDENED, *SITE, "--entrypoint", "sh"]) as site:
        site.wait_for_log("step 5/")
        assert not any("tini" in line for _, _, line in site.processes())
        assert site.stop() == EXIT_STOPPED, site.logs()
        assert "stopped at step" in site.logs()


def test_no_process_survives_a_stop(image: dict[str, Any]) -> None:
    """In the host's process namespace nothing but the launcher itself ends torchrun and the workers."""
    mark = f"HIERA_TEST_MARK={os.urandom(8).hex()}"
    with Container(*QUICKSTART, *LONG, options=["--pid=host", "--env", mark, "--no-healthcheck"]) as container:
        container.wait_for_log("step 5/")
        assert len(marked(mark)) >= 4
        assert container.stop() == EXIT_STOPPED, container.logs()
        assert marked(mark) == []


def marked(mark: str) -> list[int]:
    """Processes of this machine with the mark in their environment; zombies count too, by their command."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


@pytest.mark.parametrize(
    ("limit", "code", "line"),
    [
        ("300m", EXIT_CONFIG, "memory: this container may use 300 MiB, and a run needs 640 MiB or more; raise"),
        ("700m", EXIT_FAILED, "the kernel ended a process for want of memory: raise --memory (now 700 MiB)"),
    ],
)
def test_too_little_memory(image: dict[str, Any], limit: str, code: int, line: str) -> None:
    answer = run(*QUICKSTART, *SHORT, "--set", "runtime.max_restarts=0", options=[f"--memory={limit}"])
    assert answer.returncode == code, answer.stderr
    assert line in answer.stderr
    assert "Traceback" not in answer.stderr


def test_half_a_gibibyte(image: dict[str, Any]) -> None:
    """Two processes with torch in them do not fit: said at once, not after a minute of restarts."""
    answer = run(*QUICKSTART, *SHORT, options=[*HARDENED, "--memory=512m", "--tmpfs=/runs:mode=1777", "--tmpfs=/cache"])
    assert answer.returncode == EXIT_CONFIG
    assert answer.stderr.count("\n") == 1
    assert "512 MiB, and a run needs 640 MiB" in answer.stderr


def test_a_mounted_configuration_and_mounted_data(volumes: Volumes, pictures: Path, tmp_path: Path) -> None:
    """A file of one's own by path, data at /data without a word about it in the configuration."""
    write_config(tmp_path / "mine.yaml")
    # A folder instead of a volume takes its owner as the user, who is not in the image's /etc/passwd.
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o700)
    os.chown(runs, 4242, 4242)
    mounts = ["--user=4242:4242", f"--volume={tmp_path}:/config:ro", f"--volume={pictures}:/data:ro"]
    mounts += [f"--volume={runs}:/runs", volumes("/cache")]
    answer = run("--config", "/config/mine.yaml", options=mounts)
    assert answer.returncode == EXIT_FINISHED, answer.stderr
    assert "note:" not in answer.stderr
    answer = run("export", "/runs/hiera", "--to", "/runs/hiera/weights.safetensors", options=mounts)
    assert answer.returncode == EXIT_FINISHED, answer.stderr
    weights = runs / "hiera" / "weights.safetensors"
    assert weights.stat().st_size > 1000
    assert weights.stat().st_uid == 4242


@pytest.mark.parametrize(
    ("arguments", "options", "line"),
    [
        (["--config", "base.yaml"], [], "add -v FOLDER:/data:ro"),
        (["--config", "eeg-1d"], ["--tmpfs=/data"], "/data holds 0 .npy files"),
        (["--config", "base", "--set", "data.path=/data/train"], [], "mount it: -v FOLDER:/data:ro"),
        (["--config", "/config/mine.yaml"], [], "-v FOLDER:/config:ro"),
        ([*QUICKSTART], ["--read-only", "--tmpfs=/cache"], "read-only; add -v runs:/runs"),
        ([*QUICKSTART], ["--volume={folder}:/runs"], "cannot be written by uid 10001; add --user"),
        (
            [*QUICKSTART],
            ["--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp:noexec", "--tmpfs=/runs:mode=1777"],
            "add -v cache:/cache",
        ),
        (["reconstruct", "runs/mine"], [], "mount the runs: -v runs:/runs"),
        (["export", "runs/mine", "--to", "/runs/x.pth"], [], "mount the runs: -v runs:/runs"),
    ],
)
def test_what_is_not_mounted_is_named(
    image: dict[str, Any], arguments: list[str], options: list[str], line: str, tmp_path: Path
) -> None:
    # A folder of root's, as Docker makes one where a bind mount has none.
    tmp_path.chmod(0o755)
    answer = run(*arguments, options=[option.format(folder=tmp_path) for option in options])
    assert answer.returncode == EXIT_CONFIG, answer.stderr
    assert line in answer.stderr
    assert answer.stderr.count("\n") <= 2


def test_health_check_sees_a_loop_that_stands_still(stuck: tuple[Container, float]) -> None:
    """Last: a run may stand still for two minutes, or twenty usual steps, before it counts as stuck."""
    container, since = stuck
    limit = float(json.loads(container.execute("hiera-train-health", check=False))["limit_seconds"])
    assert limit >= 120
    time.sleep(max(0.0, since + limit + 5 - time.monotonic()))
    # The image's HEALTHCHECK as the engine runs it.
    answer = podman("healthcheck", "run", container.name, check=False)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert '"stuck"' in container.execute("hiera-train-health", check=False)
    for pid, state, _ in container.processes():
        if state == "T":
            container.execute("bash", "-c", f"kill -CONT {pid}")
    wait_for(lambda: podman("healthcheck", "run", container.name, check=False).returncode == 0)
    assert container.stop() == EXIT_STOPPED
