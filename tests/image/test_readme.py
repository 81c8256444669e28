"""The README's Docker section word for word: its commands run as they are written, with podman for docker.

What stands for a machine of one's own is replaced: $DATA, the names of the volumes and the port on the host. Only
settings that let a CPU finish are added, at the end.
"""

from __future__ import annotations

import json
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from service.errors import EXIT_FINISHED, EXIT_STOPPED
from tests.image.conftest import DOCKER
from tests.image.podman import IMAGE, LABEL, Container, Volumes, limits, podman, wait_for
from tests.system.test_prometheus import Prometheus, free_port

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(3000)]

SMALL = {"train.epochs": "null", "train.steps": "2", "train.global_batch": "2"} | {
    "optim.warmup_epochs": "0",
    "optim.warmup_steps": "1",
}


def section() -> str:
    text = (DOCKER.parent / "README.md").read_text(encoding="utf-8")
    return text.partition("\n## Docker\n")[2].partition("\n## ")[0]


def commands() -> list[list[str]]:
    """Words of each command of the section, from its code blocks and from its lines."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", section(), re.DOTALL)).replace("\\\n", " ")
    inline = re.findall(r"`((?:docker|make) [^`]+)`", section())
    words = [shlex.split(line, comments=True) for line in [*blocks.splitlines(), *inline]]
    return [command for command in words if command]


def command(*marks: str) -> list[str]:
    """The one command of the section that has all these words."""
    found = [words for words in commands() if set(marks) <= set(words)]
    assert len(found) == 1, f"{marks} in {found}"
    return found[0]


def play(words: list[str], *further: str, replaced: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a `docker run` of the README."""
    assert words[:2] == ["docker", "run"]
    rest = [(replaced or {}).get(word, word) for word in words[2:]]
    rest = [IMAGE if word == "hiera-train" else word for word in rest]
    start = ["run", "--pull=never", f"--label={LABEL}", "--no-healthcheck", *limits()]
    answer = podman(*start, *rest, *further, check=False, timeout=2400)
    return answer.returncode, answer.stdout, answer.stderr


def test_every_command_is_one_that_is_tested() -> None:
    """Here, or the Makefile's own; a new one in the README needs a test."""
    tested = [
        ["make", "image"],
        command("--config", "quickstart.yaml"),
        command("--gpus"),
        command("export"),
        command("stop"),
    ]
    assert sorted(commands()) == sorted(tested)


def test_first_run(image: dict[str, Any], tmp_path: Path) -> None:
    """The quick start to its end: no GPU, no data, no mounts. A real Prometheus scrapes its published port."""
    words = command("--config", "quickstart.yaml")
    port = free_port()
    published = [*words[:2], f"--publish=127.0.0.1:{port}:9400", *words[2:]]
    server = Prometheus(tmp_path, f"127.0.0.1:{port}")
    try:
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(play, published)
            wait_for(lambda: run.done() or (server.value("hiera_samples_total") or 0) > 0)
            assert server.value("hiera_healthy") == 1
            assert server.value('hiera_run_info{run="quickstart"}') == 1
            code, output, errors = run.result()
    finally:
        server.close()
    assert code == EXIT_FINISHED, errors
    assert "finished at step 300" in errors
    assert "-v runs:/runs keeps it" in errors
    loss, trivial = re.findall(r"validation loss ([0-9.]+) .*mean: ([0-9.]+)", output)[-1]
    assert 0.1 < float(loss) < 0.6 * float(trivial)
    left = podman("ps", "--all", "--quiet", "--filter", f"label={LABEL}", "--filter", "status=exited").stdout
    assert left == "", "--rm left a container"


def test_training_and_export(volumes: Volumes, pictures: Path) -> None:
    """The command for machines with GPUs, on a CPU; then the weights from the volume."""
    runs, cache = (volumes(place).partition("=")[2] for place in ("/runs", "/cache"))
    replaced = {
        "$DATA:/data:ro": f"{pictures}:/data:ro",
        "runs:/runs": runs,
        "cache:/cache": cache,
        "9400:9400": f"127.0.0.1:{free_port()}:9400",
    }
    training = command("--gpus")
    assert set(replaced) < set(training)
    settings = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    code, output, errors = play(training, *settings, replaced=replaced)
    assert code == EXIT_FINISHED, errors
    assert "step 2/2" in output
    code, output, errors = play(command("export"), replaced=replaced)
    assert code == EXIT_FINISHED, errors
    weights = volumes.path("/runs") / "hiera-base" / "weights.safetensors"
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert len(header) > 200


def test_stop(image: dict[str, Any]) -> None:
    """`docker stop` writes a checkpoint, and the exit code is 75."""
    words = command("stop")
    assert words[-1] == "CONTAINER"
    with Container(
        "--config", "quickstart.yaml", "--set", "train.log_every=5", options=["--no-healthcheck"]
    ) as container:
        container.wait_for_log("step 5/")
        podman(*words[1:-1], container.name, timeout=180)
        wait_for(lambda: not container.state()["Running"])
        assert container.state()["ExitCode"] == EXIT_STOPPED, container.logs()
        assert "exit code is 75" in section()
        assert "stopped at step" in container.logs()
