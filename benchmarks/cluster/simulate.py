"""Launchers of many nodes on one machine: what their metrics endpoints and their rendezvous cost.

    python benchmarks/cluster/simulate.py [--nodes 16 64 256] [--workers 8]

Endpoints are the launcher's own exporters, filled as by workers and scraped over HTTP as Prometheus would.
Rendezvous joins are torch's own agents' handlers, one a thread, against one store. Both share this
machine's cores, so the times are upper bounds of what a cluster sees. The table goes into docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry

from service.launch.rendezvous import timing
from service.metrics.exporter import Exporter
from service.metrics.names import METRICS


def endpoints(nodes: int, workers: int) -> dict[str, float]:
    """Start, fill and scrape the endpoints of all nodes."""
    exporters = []
    for node in range(nodes):
        exporter = Exporter(CollectorRegistry(), node_rank=node, workers=workers)
        for local_rank in range(workers):
            exporter.receive(_datagram(node, workers, local_rank))
        warning = exporter.serve("127.0.0.1", 0)
        assert warning is None, warning
        exporters.append(exporter)
    addresses = [f"http://127.0.0.1:{exporter.port}/metrics" for exporter in exporters]
    started, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(_scrape, addresses))
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    for exporter in exporters:
        exporter.close()
    series = sum(1 for text in texts for line in text.splitlines() if line and line[0] != b"#"[0])
    size = sum(map(len, texts))
    return {"series": series, "bytes": size, "scrape_s": wall, "cpu_ms_a_node": 1000 * cpu / nodes}


def _datagram(node: int, workers: int, local_rank: int) -> bytes:
    """All metrics that workers write, as one datagram."""
    kinds = {"gauge": "set", "counter": "add", "histogram": "observe"}
    message: dict[str, object] = {"rank": node * workers + local_rank, "local_rank": local_rank}
    for metric in METRICS:
        if metric.source == "worker" and (local_rank == 0 or "local_rank" in metric.labels):
            values = message.setdefault(kinds[metric.kind], {})
            values[metric.name] = [0.25] if metric.kind == "histogram" else 1.0  # type: ignore[index]
    return json.dumps(message).encode()


def _scrape(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=30) as answer:
        body: bytes = answer.read()
    return body


def rendezvous(nodes: int, keep_alive: int | None, timeout: float = 300.0) -> float | None:
    """Seconds until all nodes have joined one round; None when they have not within `timeout`.

    `keep_alive`: seconds between the heartbeats of a node (5 is torch's default); None: as the launcher sets it.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = timing(nodes) if keep_alive is None else {"keep_alive_interval": keep_alive}
    ranks: list[int] = []
    begin = threading.Barrier(nodes + 1)

    def join(node: int) -> None:
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"127.0.0.1:{port}",
            run_id="simulation",
            min_nodes=nodes,
            max_nodes=nodes,
            local_addr="127.0.0.1",
            is_host=str(node == 0),
            join_timeout=str(int(timeout)),
            **{name: str(value) for name, value in settings.items()},
        )
        # Node 0 first, as the launchers' preflight makes sure.
        if node:
            begin.wait()
        handler = get_rendezvous_handler(parameters)
        if node == 0:
            begin.wait()
        ranks.append(handler.next_rendezvous().rank)
        handlers.append(handler)

    handlers: list[object] = []
    for node in range(nodes):
        threading.Thread(target=join, args=(node,), daemon=True).start()
    begin.wait()
    started = time.perf_counter()
    while len(ranks) < nodes and time.perf_counter() - started < timeout:
        time.sleep(0.05)
    if len(ranks) < nodes:
        return None
    wall = time.perf_counter() - started
    assert sorted(ranks) == list(range(nodes))
    return wall


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16, 64, 128, 256])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--keep-alive", type=int, help="seconds between heartbeats (the launcher's)")
    options = parser.parse_args()
    # Each look-up of 127.0.0.1's name that fails is a line otherwise.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, {options.workers} workers a node\n")
    print("| nodes | series | bytes a scrape | all scraped in | CPU a node | rendezvous |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for nodes in options.nodes:
        found = endpoints(nodes, options.workers)
        joined = rendezvous(nodes, options.keep_alive)
        print(
            f"| {nodes} | {found['series']:.0f} | {found['bytes'] / 1e6:.2f} MB | {found['scrape_s']:.2f} s "
            f"| {found['cpu_ms_a_node']:.1f} ms | {'no' if joined is None else f'{joined:.1f} s'} |",
            flush=True,
        )
    # Handlers of threads that still send heartbeats have nothing to wait for.
    os._exit(0)


if __name__ == "__main__":
    main()
