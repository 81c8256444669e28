"""The node's metrics endpoint: reads the workers' datagrams, keeps the numbers, answers Prometheus.

It lives in the launcher, so that counters go on when workers are started again. It runs in threads of its
own and never ends the run: a port that is taken is a warning, a datagram that is not understood is counted.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    exposition,
)

from service.metrics.health import LAUNCHED, Health
from service.metrics.names import BY_NAME, METRICS, PREFIX, Metric

# One creation time a series would double the series for nothing that the run's own timestamps do not say.
disable_created_metrics()  # type: ignore[no-untyped-call]

Collector = Counter | Gauge | Histogram
MAX_LOCAL_RANK = 63
"""Labels stay bounded whatever a datagram says."""


def make_collectors(registry: CollectorRegistry) -> dict[str, Collector]:
    """One collector a row of the table, by name without prefix."""
    collectors: dict[str, Collector] = {}
    for metric in METRICS:
        if metric.kind == "counter":
            collectors[metric.name] = Counter(metric.full_name, metric.help, metric.labels, registry=registry)
        elif metric.kind == "histogram":
            collectors[metric.name] = Histogram(
                metric.full_name, metric.help, metric.labels, buckets=metric.buckets, registry=registry
            )
        else:
            collectors[metric.name] = Gauge(metric.full_name, metric.help, metric.labels, registry=registry)
    return collectors


class Exporter:
    """Metrics of one node: `registry` is injected, so that tests and other exporters do not meet.

    `on_start` is called from the reader thread each time workers say that they start.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        node_rank: int = 0,
        workers: int = 1,
        health: Health | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.registry = registry
        self.health = health or Health()
        self.port: int | None = None
        """Port the endpoint listens on; None while it does not."""
        self._node = str(node_rank)
        self._on_start = on_start
        self._collectors = make_collectors(registry)
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._socket: socket.socket | None = None
        self._socket_path: Path | None = None
        self._threads: list[threading.Thread] = []
        self._closing = False
        # Series that start at 0 give rates from the first increase on.
        for metric in METRICS:
            if metric.kind in ("counter", "histogram"):
                for local_rank in range(workers if "local_rank" in metric.labels else 1):
                    self._child(metric, local_rank)
        self._child(BY_NAME["last_step_timestamp_seconds"], 0).set(0)
        self._child(BY_NAME["healthy"], 0).set_function(lambda: float(self.health.report()[0]))

    def _child(self, metric: Metric, local_rank: int) -> Any:
        collector = self._collectors[metric.name]
        if "local_rank" in metric.labels:
            return collector.labels(self._node, str(local_rank))
        return collector.labels(self._node)

    def info(self, name: str, **labels: str) -> None:
        """Set an info metric (build_info, run_info) to 1 with these labels, besides node."""
        self._collectors[name].labels(node=self._node, **labels).set(1)  # type: ignore[union-attr]

    def add(self, name: str, value: float = 1.0) -> None:
        """Launcher side: add to a counter of this node."""
        self._child(BY_NAME[name], 0).inc(value)

    # Datagrams

    def open_socket(self, directory: Path) -> Path:
        """Make the datagram socket in a directory of this user alone and start reading; returns its path.

        Raises OSError.
        """
        path = directory / "metrics"
        self._socket_path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._start(self._read, "metrics-reader")
        return path

    def _read(self) -> None:
        assert self._socket is not None
        while not self._closing:
            try:
                data = self._socket.recv(1 << 17)
            except OSError:
                return
            if data and not self._closing:
                self.receive(data)

    def receive(self, data: bytes) -> None:
        """Take one datagram. Never raises: what cannot be used is counted in datagrams_malformed_total."""
        with self._lock:
            self.add("datagrams_total")
            bad, good = 0, set[str]()
            try:
                message = json.loads(data)
                local_rank = message.get("local_rank", 0)
                if not isinstance(local_rank, int) or not 0 <= local_rank <= MAX_LOCAL_RANK:
                    raise ValueError("local rank")
                for operation in ("set", "add", "observe"):
                    values = message.get(operation, {})
                    if not isinstance(values, dict):
                        raise ValueError(operation)
                    for name, value in values.items():
                        if self._apply(operation, name, value, local_rank):
                            good.add(name)
                        else:
                            bad += 1
                self._note(message, good)
            except (ValueError, AttributeError, RecursionError):
                bad += 1
            if bad:
                self.add("datagrams_malformed_total", bad)

    def _apply(self, operation: str, name: str, value: object, local_rank: int) -> bool:
        metric = BY_NAME.get(name)
        if metric is None or metric.source != "worker":
            return False
        expected = {"set": "gauge", "add": "counter", "observe": "histogram"}[operation]
        if metric.kind != expected:
            return False
        numbers: list[Any] = value if operation == "observe" and isinstance(value, list) else [value]
        if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
            return False
        try:
            numbers = [float(number) for number in numbers]
        except OverflowError:  # a whole number beyond any float
            return False
        child = self._child(metric, local_rank)
        if operation == "add" and not all(0 <= number < math.inf for number in numbers):
            return False
        update = {"set": "set", "add": "inc", "observe": "observe"}[operation]
        for number in numbers:
            getattr(child, update)(number)
        return True

    def _note(self, message: Mapping[str, Any], good: set[str]) -> None:
        """Follow the progress of the node; local rank 0 speaks for it. `good`: names of values taken."""
        if message.get("local_rank", 0) != 0:
            return
        phase = message.get("phase")
        if phase == LAUNCHED:
            self.health.note_start()
            if self._on_start is not None:
                self._on_start()
        elif isinstance(phase, str):
            self.health.note_phase(phase)
        advanced = False
        if "step" in good:
            advanced = self.health.note_step(message["set"]["step"])
        if "step_seconds" in good:
            observed = message["observe"]["step_seconds"]
            for seconds in observed if isinstance(observed, list) else [observed]:
                self.health.note_step_seconds(float(seconds))
                advanced = True
        if advanced:
            self._child(BY_NAME["last_step_timestamp_seconds"], 0).set(time.time())

    # HTTP

    def serve(self, host: str, port: int) -> str | None:
        """Start the endpoint; returns None, or a warning that names the address when it cannot listen."""
        try:
            self._server = _Server(self, host, port)
        except (OSError, OverflowError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return f"metrics.port: {host}:{port} cannot be used ({reason}); training goes on without /metrics"
        self.port = int(self._server.server_address[1])
        self._start(self._server.serve_forever, "metrics-http")
        return None

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        """Stop listening and remove the socket; may be called twice."""
        self._closing = True
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server, self.port = None, None
        if self._socket is not None and self._socket_path is not None:
            # Wakes the reader, which a mere close would leave in recv.
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
                waker.setblocking(False)
                waker.sendto(b"", str(self._socket_path))
        for thread in self._threads:
            thread.join(timeout=2)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)
            self._socket_path = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, exporter: Exporter, host: str, port: int) -> None:
        self.exporter = exporter
        self.address_family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's reverse look-up of the own name, which waits for DNS where there is
        none.
        """
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that hangs up is no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    # A client that connects and says nothing must not keep its thread.
    timeout = 10
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """/metrics, /healthz (200, or 503 when stuck) and nothing else."""
        path = self.path.partition("?")[0]
        exporter = self.server.exporter
        if path == "/metrics":
            encode, content_type = exposition.choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(exporter.registry))
        elif path == "/healthz":
            healthy, report = exporter.health.report()
            self._answer(200 if healthy else 503, "application/json", json.dumps(report).encode() + b"\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", f"{PREFIX}run: /metrics or /healthz\n".encode())

    do_HEAD = do_GET

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged: they would fill the run's output."""
