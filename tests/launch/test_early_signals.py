"""A stop request that arrives while the launcher is still being loaded, or when it is nearly gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from service.launch.state import read_state

# The process signals itself when it begins to import a module, so that no clock is involved.
CODE = """
import os, signal, sys
# nohup and background jobs leave these ignored to their children
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
number, moment = int(sys.argv.pop(1)), sys.argv.pop(1)
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Hook())
from service.cli import main
code = main()
os.kill(os.getpid(), number)
sys.exit(code)
"""


def start(folder: Path, moment: str, number: int, *more: str) -> subprocess.CompletedProcess[str]:
    run = ["--config", "quickstart", "--set", "data.kind=synthetic", "--set", f"run.dir={folder / 'run'}"]
    run += ["--set", "metrics.enabled=false", "--set", f"runtime.cache_dir={folder / 'cache'}", *more]
    command = [sys.executable, "-c", CODE, str(int(number)), moment, *run]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["service.config.checks", "service.launch.launcher", "service.metrics.exporter"])
def test_it_stops_the_run_in_good_order(tmp_path: Path, moment: str, number: int) -> None:
    done = start(tmp_path, moment, number)
    assert done.returncode == 75, done.stderr
    assert "stopped before training began; the same command starts again" in done.stderr
    assert "Traceback" not in done.stderr
    state = read_state(tmp_path / "run", 0)
    assert state is not None
    assert (state.status, state.ended) == ("stopped", True)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_mistake_keeps_its_own_exit_code(tmp_path: Path) -> None:
    done = start(tmp_path, "service.config.checks", signal.SIGTERM, "--set", "train.stesp=1")
    assert done.returncode == 78, done.stderr
    assert "did you mean train.steps?" in done.stderr


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ("service.config.load", ["config", "show", "base"]),
        ("service.config.checks", ["--config", "tiny", "--set", "data.kind=synthetic", "--dry-run"]),
        ("service.config.summary", ["run", "--dry-run", "--config", "tiny", "--set", "data.kind=synthetic"]),
    ],
)
def test_other_commands_and_dry_runs_are_interrupted_at_once(moment: str, words: list[str]) -> None:
    command = [sys.executable, "-c", CODE, str(int(signal.SIGINT)), moment, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert "interrupted" in done.stderr
