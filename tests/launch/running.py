"""A launcher as a real process, with real torchrun and fake workers, for the integration tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.launch import processes
from service.launch.state import ATTEMPT_VARIABLE, read_state

REPOSITORY = Path(__file__).resolve().parents[2]


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Value of `condition` as soon as it is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


class Running:
    """One launcher: `process`, its output in `text()`, its torchrun and workers by process id."""

    def __init__(
        self,
        directory: Path,
        script: dict[str, Any],
        sections: dict[str, dict[str, Any]] | None = None,
        flags: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        name: str = "launcher",
    ) -> None:
        config: dict[str, dict[str, Any]] = {
            "run": {"dir": str(directory)},
            "runtime": {
                "device": "cpu",
                "nproc_per_node": 2,
                "grace_seconds": 20,
                "cache_dir": str(directory.parent / "cache"),
            },
            "data": {"kind": "synthetic"},
            "train": {"global_batch": 8},
            "metrics": {"host": "127.0.0.1", "port": 0},
        }
        for section, fields in (sections or {}).items():
            config.setdefault(section, {}).update(fields)
        self.directory = directory
        self.log = directory.parent / f"{name}.log"
        self._output = self.log.open("wb")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HIERA", "PYTORCH"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.driver", json.dumps(config), json.dumps(flags or {})],
            cwd=REPOSITORY,
            env={**inherited, "FAKE_SCRIPT": json.dumps(script), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def text(self) -> str:
        """What the launcher and its workers printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float = 60.0) -> int:
        """Exit code of the launcher."""
        return self.process.wait(timeout=seconds)

    def training(self, rank: int = 1) -> None:
        """Wait until a rank has done some steps."""
        wait_for(lambda: (self.directory / f"step-{rank}").exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()

    def worker(self, rank: int) -> int:
        """Process id of a rank."""
        return int((self.directory / f"pid-{rank}").read_text())

    def torchrun(self) -> int:
        """Process id of torchrun."""
        return int(processes.children(self.process.pid)[0])

    def metrics(self) -> str:
        """Address of the endpoint."""
        line = wait_for(lambda: [x for x in self.text().splitlines() if "metrics at http" in x])[0]
        return str(line).split("metrics at ")[1]

    def starts(self) -> list[str]:
        """`rank restart` for each start of a worker, in order."""
        return (self.directory / "starts").read_text().splitlines()

    def orphans(self) -> list[int]:
        """Live processes that carry this start's mark, wherever they hang."""
        state = read_state(self.directory, 0)
        assert state is not None
        return [pid for pid in processes.parents() if processes.has_variable(pid, ATTEMPT_VARIABLE, state.attempt)]

    def close(self) -> None:
        """End what is left of a test that failed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()
