"""The node's endpoint: table against live page, bad datagrams, ports, restarts, health."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from service.metrics.client import MetricsClient
from service.metrics.exporter import Exporter
from service.metrics.health import LAUNCHED, Health, Limits
from service.metrics.names import METRICS, PREFIX

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    """Exporter of node 3 with two workers."""
    made = Exporter(CollectorRegistry(), node_rank=3, workers=2)
    yield made
    made.close()


def value(exporter: Exporter, name: str, **labels: str) -> float | None:
    return exporter.registry.get_sample_value(PREFIX + name, {"node": "3", **labels})


def get(exporter: Exporter, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_table_page_and_live_endpoint_agree(exporter: Exporter) -> None:
    assert exporter.serve("127.0.0.1", 0) is None
    status, body = get(exporter, "/metrics")
    assert status == 200
    live = {family.name: family for family in text_string_to_metric_families(body)}
    kinds = {"info": "gauge"}
    table = {
        metric.full_name.removesuffix("_total") if metric.kind == "counter" else metric.full_name: metric
        for metric in METRICS
    }
    assert set(live) == set(table)
    for name, metric in table.items():
        assert live[name].type == kinds.get(metric.kind, metric.kind), name
        assert live[name].documentation == metric.help
        for sample in live[name].samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
    page = (MONITORING / "METRICS.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == {metric.full_name for metric in METRICS}


def test_counters_begin_at_zero_for_each_worker(exporter: Exporter) -> None:
    assert value(exporter, "samples_total") == 0
    assert value(exporter, "data_wait_seconds_total", local_rank="1") == 0
    assert value(exporter, "data_wait_seconds_total", local_rank="2") is None
    assert value(exporter, "loss") is None


def test_datagrams_of_two_workers(exporter: Exporter, tmp_path: Path) -> None:
    path = str(exporter.open_socket(tmp_path))
    for local_rank in (0, 1):
        client = MetricsClient(path, rank=local_rank, local_rank=local_rank)
        client.add("samples_total", 4)
        client.observe("step_seconds", 0.2)
        client.set("memory_peak_bytes", 100 + local_rank)
        client.close()
    deadline = time.monotonic() + 5
    while value(exporter, "datagrams_total") != 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert value(exporter, "samples_total") == 8
    assert value(exporter, "step_seconds_count", local_rank="1") == 1
    assert value(exporter, "memory_peak_bytes", local_rank="1") == 101
    assert value(exporter, "datagrams_malformed_total") == 0
    exporter.close()
    assert not Path(path).exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"[" * 100_000,
        b'{"set": []}',
        b'{"set": {"loss": "high"}}',
        b'{"set": {"loss": true}}',
        b'{"set": {"samples_total": 1}}',
        b'{"add": {"loss": 1}}',
        b'{"add": {"samples_total": -1}}',
        b'{"add": {"samples_total": Infinity}}',
        b'{"add": {"samples_total": NaN}}',
        b'{"set": {"loss": 1' + b"0" * 400 + b"}}",
        b'{"add": {"restarts_total": 1}}',
        b'{"set": {"no_such_metric": 1}}',
        b'{"observe": {"step_seconds": [1, null]}}',
        b'{"set": {"loss": 1}, "local_rank": 64}',
        b'{"set": {"loss": 1}, "local_rank": "0"}',
        b'{"set": {"loss": 1}, "local_rank": -1}',
    ],
)
def test_malformed_datagrams_are_ignored_and_counted(exporter: Exporter, data: bytes) -> None:
    before = [(s.name, s.labels, s.value) for f in exporter.registry.collect() for s in f.samples]
    exporter.receive(data)
    after = [(s.name, s.labels, s.value) for f in exporter.registry.collect() for s in f.samples]
    assert value(exporter, "datagrams_malformed_total") == 1
    assert value(exporter, "datagrams_total") == 1
    changed = {name for name, _, _ in set(map(str_key, after)) ^ set(map(str_key, before))}
    assert changed <= {"hiera_datagrams_total", "hiera_datagrams_malformed_total"}


def str_key(sample: tuple[str, dict[str, str], float]) -> tuple[str, str, float]:
    return sample[0], json.dumps(sample[1]), sample[2]


def test_good_values_beside_bad_ones_count(exporter: Exporter) -> None:
    exporter.receive(b'{"set": {"loss": 0.5, "nonsense": 1}, "add": {"samples_total": 2}}')
    assert value(exporter, "loss") == 0.5
    assert value(exporter, "samples_total") == 2
    assert value(exporter, "datagrams_malformed_total") == 1


def test_a_loss_that_is_not_finite_is_shown(exporter: Exporter) -> None:
    exporter.receive(b'{"set": {"loss": NaN, "grad_norm": Infinity}}')
    assert str(value(exporter, "loss")) == "nan"
    assert value(exporter, "grad_norm") == float("inf")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", ""])
def test_port_taken_is_a_warning_that_names_it(exporter: Exporter, host: str) -> None:
    with socket.socket() as other:
        other.bind((host, 0))
        other.listen()
        port = other.getsockname()[1]
        warning = exporter.serve(host, port)
    assert warning is not None
    assert f"{host}:{port} cannot be used (Address already in use)" in warning
    assert exporter.port is None
    exporter.receive(b'{"set": {"loss": 0.5}}')
    assert value(exporter, "loss") == 0.5


@pytest.mark.parametrize(
    ("host", "port"), [("no-such-host.invalid", 9400), ("203.0.113.7", 0), ("::", 99999), ("a" * 70, 9400)]
)
def test_impossible_address_is_a_warning(exporter: Exporter, host: str, port: int) -> None:
    warning = exporter.serve(host, port)
    assert warning is not None
    assert "\n" not in warning


def test_other_paths_and_methods(exporter: Exporter) -> None:
    assert exporter.serve("127.0.0.1", 0) is None
    assert get(exporter, "/")[0] == 404
    assert get(exporter, "/metrics?x=1")[0] == 200
    request = urllib.request.Request(f"http://127.0.0.1:{exporter.port}/metrics", method="HEAD")
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.read() == b""
    with socket.create_connection(("127.0.0.1", exporter.port or 0), timeout=5) as raw:
        raw.sendall(b"\x16\x03\x01\x02\x00 not http\r\n\r\n")
        assert b"400" in raw.recv(4096)
    assert get(exporter, "/metrics")[0] == 200


def test_open_metrics_for_those_who_ask(exporter: Exporter) -> None:
    assert exporter.serve("127.0.0.1", 0) is None
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert "openmetrics" in answer.headers["Content-Type"]
        assert answer.read().endswith(b"# EOF\n")


class Clock:
    """Time by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_health_tells_stuck_from_compiling() -> None:
    clock = Clock()
    health = Health(Limits(factor=20, floor=10, starting=3600, other=1800), clock=clock)
    health.note_phase("starting")
    health.note_phase("compiling")
    clock.now += 3000
    assert health.report()[0], "compiling takes long"
    for step in range(1, 6):
        clock.now += 1
        health.note_step(step)
    assert health.phase == "training"
    clock.now += 19
    # Datagrams without progress are no progress.
    health.note_phase("training")
    health.note_step(5)
    assert health.report()[0]
    clock.now += 2
    healthy, report = health.report()
    assert not healthy
    assert report == {
        "status": "stuck",
        "phase": "training",
        "step": 5,
        "seconds_without_progress": 21.0,
        "limit_seconds": 20.0,
    }
    health.note_phase("validating")
    clock.now += 1000
    assert health.report()[0]
    health.note_phase("training")
    clock.now += 5
    assert health.report()[0]


def test_health_after_a_restart_and_of_a_start_that_hangs() -> None:
    clock = Clock()
    health = Health(Limits(starting=100), clock=clock)
    health.note_step(1)
    health.note_step(50)
    clock.now += 5000
    assert not health.report()[0]
    health.note_start()
    assert health.report()[0]
    clock.now += 101
    assert not health.report()[0]


def test_healthz_and_start_callback() -> None:
    clock = Clock()
    starts: list[int] = []
    health = Health(Limits(floor=10), clock=clock)
    exporter = Exporter(CollectorRegistry(), health=health, on_start=lambda: starts.append(1))
    try:
        assert exporter.serve("127.0.0.1", 0) is None
        exporter.receive(json.dumps({"local_rank": 0, "phase": LAUNCHED}).encode())
        exporter.receive(json.dumps({"local_rank": 1, "phase": LAUNCHED}).encode())
        assert starts == [1]
        exporter.receive(b'{"set": {"step": 1}, "observe": {"step_seconds": [0.1]}, "phase": "training"}')
        status, body = get(exporter, "/healthz")
        assert (status, json.loads(body)["status"]) == (200, "ok")
        clock.now += 11
        status, body = get(exporter, "/healthz")
        assert (status, json.loads(body)["status"]) == (503, "stuck")
        assert exporter.registry.get_sample_value("hiera_healthy", {"node": "0"}) == 0
    finally:
        exporter.close()
        exporter.close()
