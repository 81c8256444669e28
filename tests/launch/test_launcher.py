"""The launcher with real torchrun: outcomes, restarts, signals, kills; the workers are fake."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.launch import processes
from service.launch.state import read_state
from tests.launch.running import Running, wait_for

Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start launchers that end with the test."""
    started: list[Running] = []

    def begin(script: dict[str, Any], *, name: str = "run", **more: Any) -> Running:
        started.append(Running(tmp_path / name, script, name=f"{name}-{len(started)}", **more))
        return started[-1]

    yield begin
    for running in started:
        running.close()


def outcome(running: Running) -> tuple[str, int, int]:
    """(status, step, exit code) of the state file."""
    state = read_state(running.directory, 0)
    assert state is not None
    return state.status, state.step, state.exit_code


def test_finished_run_with_metrics_and_small_launcher(start: Start) -> None:
    running = start({"steps": 60})
    running.training()
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    kibibytes = int(status.partition("VmRSS:")[2].split()[0])
    assert kibibytes < 150 * 1024
    maps = Path(f"/proc/{running.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    body = urllib.request.urlopen(running.metrics() + "/metrics", timeout=5).read().decode()
    assert 'hiera_restarts_total{node="0"} 0.0' in body
    assert 'hiera_step_seconds_count{local_rank="1",node="0"}' in body
    health = json.load(urllib.request.urlopen(running.metrics() + "/healthz", timeout=5))
    assert health["status"] == "ok"
    assert health["phase"] == "training"
    assert running.wait() == 0, running.text()
    assert outcome(running) == ("finished", 60, 0)
    assert "finished at step 60" in running.text()
    assert running.orphans() == []


@pytest.mark.parametrize(
    ("what", "said"), [("kill", "was killed by SIGKILL"), ("state:1:boom", "failed with exit code 1")]
)
def test_crashed_worker_is_started_again_and_counters_go_on(start: Start, what: str, said: str) -> None:
    running = start({"steps": 60, "on": {"0": what}, "rank": 1})
    url = running.metrics() + "/metrics"
    wait_for(lambda: (running.directory / "starts").exists() and len(running.starts()) == 4)
    running.training()
    body = urllib.request.urlopen(url, timeout=5).read().decode()
    assert 'hiera_restarts_total{node="0"} 1.0' in body
    assert outcome(running)[0] == "running"
    assert running.wait() == 0, running.text()
    assert sorted(running.starts()) == ["0 0", "0 1", "1 0", "1 1"]
    assert "worker 1" in running.text()
    assert said in running.text()
    assert "Traceback" not in running.text()


def test_restarts_are_limited(start: Start) -> None:
    running = start({"on": {"0": "exit:1", "1": "exit:1"}}, sections={"runtime": {"max_restarts": 1}})
    assert running.wait() == 1
    assert [line for line in running.starts() if line.startswith("0")] == ["0 0", "0 1"]
    assert outcome(running)[0] == "failed"
    assert "error: workers ended without saying why" in running.text()
    assert running.orphans() == []


@pytest.mark.parametrize(("code", "rank"), [(78, 1), (70, 0)])
def test_final_failures_are_not_retried(start: Start, code: int, rank: int) -> None:
    running = start({"on": {"0": f"state:{code}:data.path: nothing there"}, "rank": rank})
    assert running.wait() == code
    assert len(running.starts()) == 2, "a worker was started again"
    lines = [line for line in running.text().splitlines() if "nothing there" in line]
    assert lines == ["hiera-train: error: data.path: nothing there"]
    assert "Traceback" not in running.text()
    assert "exitcode" not in running.text()
    assert running.orphans() == []


SIGNALS = [
    ("launcher", "SIGTERM"),
    ("launcher", "SIGUSR1"),
    ("torchrun", "SIGUSR1"),
    ("torchrun", "SIGTERM"),
    ("worker", "SIGUSR2"),
]


@pytest.mark.parametrize(("target", "name"), SIGNALS)
def test_stop_signal_twice(start: Start, target: str, name: str) -> None:
    running = start({"steps": 10_000})
    running.training(0)
    running.training(1)
    pid = {"launcher": running.process.pid, "torchrun": running.torchrun(), "worker": running.worker(1)}[target]
    number = getattr(signal, name)
    os.kill(pid, number)
    processes.send(pid, number)
    assert running.wait() == 75, running.text()
    assert outcome(running)[0] == "stopped"
    # SIGUSR1 to torchrun reached the workers as what it was.
    assert name in {path.read_text() for path in running.directory.glob("signal-*")}
    assert len(running.starts()) == 2
    assert "Traceback" not in running.text()
    assert running.orphans() == []


def test_interrupt_during_start(start: Start) -> None:
    running = start({"steps": 10_000})
    # The line before torchrun is started. A child alone may also be the probe of the cache, before the handlers.
    wait_for(lambda: "run directory" in running.text())
    running.process.send_signal(signal.SIGINT)
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 75, running.text()
    assert not (running.directory / "starts").exists()
    assert running.orphans() == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals_go_on_while_the_workers_leave(start: Start, name: str) -> None:
    running = start({"steps": 10_000, "linger": 5})
    running.training(0)
    running.training(1)
    running.process.send_signal(getattr(signal, name))
    # The launcher repeats it after 2 s.
    assert running.wait() == 75, running.text()
    assert len(list(running.directory.glob("left-*"))) == 2
    assert "Traceback" not in running.text()


def test_grace_period_ends_deaf_workers(start: Start) -> None:
    running = start({"on": {"0": "hang"}, "rank": 0}, sections={"runtime": {"grace_seconds": 2}})
    running.training()
    running.process.send_signal(signal.SIGTERM)
    # Rank 1 leaves, rank 0 hears nothing.
    assert running.wait(30) == 1
    assert "did not stop within 2 s" in running.text()
    assert running.orphans() == []


def test_killed_launcher_leaves_no_orphans_and_the_lock_is_free(start: Start) -> None:
    running = start({"steps": 10_000})
    running.training()
    second = start({"steps": 5})
    assert second.wait() == 78
    assert f"in use by another live run (pid {running.process.pid} on" in second.text()
    running.process.kill()
    running.process.wait()
    wait_for(lambda: not running.orphans(), 10)
    again = start({"steps": 5})
    assert again.wait() == 0, again.text()


def test_killed_torchrun_is_started_again_without_orphans(start: Start) -> None:
    running = start({"steps": 60, "on": {"0": "child"}})
    running.training()
    first = running.worker(0)
    os.kill(running.torchrun(), signal.SIGKILL)
    assert running.wait() == 0, running.text()
    assert "torchrun was killed by SIGKILL" in running.text()
    assert running.worker(0) != first
    assert len(running.starts()) == 4
    # The worker's detached helper of both starts is gone too.
    assert running.orphans() == []


def test_two_launches_at_once_and_a_port_that_is_taken(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        one = start({"steps": 20}, name="one", sections={"metrics": {"port": port}})
        two = start({"steps": 20}, name="two")
        assert one.wait() == 0, one.text()
        assert two.wait() == 0, two.text()
    assert f"warning: metrics.port: 127.0.0.1:{port} cannot be used (Address already in use)" in one.text()


def test_changed_settings_are_refused(start: Start) -> None:
    assert start({"steps": 2}).wait() == 0
    other = start({"steps": 2}, sections={"optim": {"weight_decay": 0.2}})
    assert other.wait() == 78
    assert "optim.weight_decay: 0.05 -> 0.2" in other.text()
    assert "Traceback" not in other.text()
    allowed = start({"steps": 2}, sections={"optim": {"weight_decay": 0.2}, "checkpoint": {"allow_changes": True}})
    assert allowed.wait() == 0, allowed.text()
    assert "weight_decay: 0.2" in (allowed.directory / "run.yaml").read_text()


def two_nodes(start: Start, script: dict[str, Any], **more: Any) -> list[Running]:
    """Two launchers that meet on this machine and share a run directory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    sections = {"runtime": {"nproc_per_node": 1, **more}}
    return [
        start(script, sections=sections, flags={"nnodes": 2, "node_rank": rank, "rdzv_endpoint": endpoint})
        for rank in (0, 1)
    ]


def test_two_nodes_restart_together(start: Start) -> None:
    nodes = two_nodes(start, {"steps": 60, "on": {"0": "kill"}, "rank": 1})
    assert [node.wait(90) for node in nodes] == [0, 0], nodes[0].text() + nodes[1].text()
    # The node whose worker lives counts no failure, but takes part in the second round.
    assert sorted(line.split()[0] for line in nodes[0].starts()) == ["0", "0", "1", "1"]


def test_failure_of_one_node_ends_the_other(start: Start) -> None:
    nodes = two_nodes(start, {"steps": 10_000, "on": {"0": "state:78:data.path: gone"}, "rank": 1})
    assert [node.wait(90) for node in nodes] == [78, 78], nodes[0].text() + nodes[1].text()
    told = [node for node in nodes if "error: node" in node.text()]
    assert len(told) == 1
    assert "data.path: gone" in told[0].text()


def test_missing_node_zero(start: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = {"nnodes": 2, "node_rank": 1, "rdzv_endpoint": endpoint}
    running = start({}, flags=flags, environment={"HIERA_RDZV_TIMEOUT": "1"})
    assert running.wait() == 1
    assert f"error: cannot reach the rendezvous at {endpoint} from node 1 within 1 s" in running.text()
    assert "Traceback" not in running.text()
