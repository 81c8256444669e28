"""The worker's client: never blocks, never raises, loses no counter while the reader is away."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.metrics.client import MAX_DATAGRAM_BYTES, MAX_PENDING_OBSERVATIONS, MetricsClient


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[socket.socket]:
    """A bound datagram socket at tmp_path/s."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "s"))
        sock.setblocking(False)
        yield sock


def read_all(reader: socket.socket) -> list[dict[str, Any]]:
    messages = []
    while True:
        try:
            messages.append(json.loads(reader.recv(1 << 17)))
        except BlockingIOError:
            return messages


def client(tmp_path: Path, interval: float = 100.0) -> MetricsClient:
    return MetricsClient(str(tmp_path / "s"), rank=5, local_rank=1, interval=interval)


def test_message(tmp_path: Path, reader: socket.socket) -> None:
    metrics = client(tmp_path)
    metrics.set("loss", 0.5)
    metrics.set("loss", 0.25)
    metrics.add("samples_total", 4)
    metrics.add("samples_total", 4)
    metrics.observe("step_seconds", 0.5)
    metrics.observe("step_seconds", 1)
    assert read_all(reader) == []
    metrics.flush()
    metrics.flush()
    assert read_all(reader) == [
        {
            "rank": 5,
            "local_rank": 1,
            "set": {"loss": 0.25},
            "add": {"samples_total": 8.0},
            "observe": {"step_seconds": [0.5, 1.0]},
        }
    ]


def test_phase_goes_at_once_and_with_every_datagram(tmp_path: Path, reader: socket.socket) -> None:
    metrics = client(tmp_path)
    metrics.phase("training")
    metrics.phase("training")
    metrics.set("step", 1)
    metrics.close()
    assert [message["phase"] for message in read_all(reader)] == ["training", "training"]


def test_sends_by_itself_when_the_interval_is_over(tmp_path: Path, reader: socket.socket) -> None:
    metrics = client(tmp_path, interval=0.0)
    metrics.add("samples_total", 1)
    assert len(read_all(reader)) == 1


def test_counters_survive_a_full_socket(tmp_path: Path, reader: socket.socket) -> None:
    metrics = client(tmp_path)
    for _ in range(2000):
        metrics.add("samples_total", 1)
        metrics.observe("step_seconds", 0.1)
        metrics.flush()
    first = read_all(reader)
    assert len(first) < 2000, "the socket was never full"
    metrics.flush()
    messages = first + read_all(reader)
    assert sum(message.get("add", {}).get("samples_total", 0) for message in messages) == 2000
    assert max(len(json.dumps(message)) for message in messages) < MAX_DATAGRAM_BYTES


def test_observations_are_bounded(tmp_path: Path) -> None:
    metrics = MetricsClient(str(tmp_path / "nobody"), interval=100.0)
    for number in range(3 * MAX_PENDING_OBSERVATIONS):
        metrics.observe("step_seconds", float(number))
    assert len(metrics._observe["step_seconds"]) == MAX_PENDING_OBSERVATIONS


def test_nobody_listens_and_nothing_fits(tmp_path: Path) -> None:
    metrics = client(tmp_path, interval=0.0)
    metrics.add("samples_total", 1)
    metrics.set("loss", "text")  # type: ignore[arg-type]
    metrics.add("samples_total", -1)
    metrics.add("samples_total", float("nan"))
    metrics.observe("step_seconds", float("nan"))
    metrics = client(tmp_path)
    for number in range(5000):
        metrics.set(f"made-up-{number}", 1.0)
    metrics.flush()
    metrics.close()
    metrics.set("loss", 1.0)
    metrics.flush()


def test_null_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIERA_METRICS_SOCKET", raising=False)
    metrics = MetricsClient.from_env()
    metrics.set("loss", 1)
    metrics.add("samples_total", 1)
    metrics.observe("step_seconds", 1)
    metrics.phase("training")
    metrics.flush()
    metrics.close()


def test_from_environment(tmp_path: Path, reader: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIERA_METRICS_SOCKET", str(tmp_path / "s"))
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "2")
    metrics = MetricsClient.from_env()
    metrics.set("loss", 1)
    metrics.flush()
    assert read_all(reader) == [{"rank": 9, "local_rank": 2, "set": {"loss": 1.0}}]
