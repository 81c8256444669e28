"""Debian's Prometheus scrapes a live run: values over its HTTP API, rules and alerts loaded and evaluated."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.running import Running
from tests.system.slurm_host import end, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(2400)]

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"


def program(name: str) -> str:
    """Path of a program of Debian's package prometheus; a missing one is a failure, not a skip."""
    path = shutil.which(name)
    assert path is not None, f"{name} is missing: apt-get install prometheus"
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "rules.yml", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
)
def test_promtool(arguments: list[str]) -> None:
    answer = subprocess.run(
        [program("promtool"), *arguments], cwd=MONITORING, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_promtool_reads_the_endpoint(live: Running) -> None:
    body = urllib.request.urlopen(live.metrics() + "/metrics", timeout=5).read()
    answer = subprocess.run([program("promtool"), "check", "metrics"], input=body, capture_output=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A run whose worker is killed once, early."""
    directory = tmp_path_factory.mktemp("prometheus")
    running = Running(directory / "run", {"steps": 100_000, "on": {"0": "kill"}, "rank": 1})
    try:
        running.training(rank=1)
        yield running
        end(running.process)
    finally:
        running.close()


class Prometheus:
    """A server on a free port that scrapes one target each second."""

    def __init__(self, directory: Path, target: str) -> None:
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(MONITORING / name) for name in config["rule_files"]]
        config["scrape_configs"] = config["scrape_configs"][:1]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = (directory / "prometheus.log").open("wb")
        self.process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=self.log,
            stderr=self.log,
        )

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an API answer, which is waited for; None when the server refuses the query."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"

        def ask() -> tuple[Any] | None:
            try:
                with urllib.request.urlopen(address, timeout=30) as answer:
                    return (json.load(answer)["data"],)
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    return (None,)
            except (OSError, http.client.HTTPException):
                # Not up yet, or busy.
                pass
            assert self.process.poll() is None, "Prometheus has ended"
            return None

        return wait_for(ask, f"for Prometheus, {path}")[0]

    def value(self, query: str) -> float:
        """Value of a query as soon as it has a sample; a scrape that a busy machine misses takes them away."""
        data = wait_for(lambda: (found := self.get("query", query=query)) and found["result"] and found, f"for {query}")
        return float(data["result"][0]["value"][1])

    def close(self) -> None:
        try:
            end(self.process)
        finally:
            self.log.close()


@pytest.fixture
def prometheus(live: Running, tmp_path: Path) -> Iterator[Prometheus]:
    """Prometheus on the live run."""
    server = Prometheus(tmp_path, live.metrics().removeprefix("http://"))
    try:
        yield server
    finally:
        server.close()


def test_live_run_in_prometheus(live: Running, prometheus: Prometheus) -> None:
    prometheus.value("hiera_step")
    wait_for(lambda: [target["health"] for target in prometheus.get("targets")["activeTargets"]] == ["up"])
    # Sum of the workers, going on through the restart; 2 workers add 4 samples a step.
    first = prometheus.value("hiera_samples_total")
    wait_for(lambda: prometheus.value("hiera_samples_total") > first)
    assert prometheus.value("resets(hiera_samples_total[1m])") == 0
    assert prometheus.value("hiera_restarts_total") == 1
    assert prometheus.value("hiera_healthy") == 1
    assert prometheus.value('count(hiera_step_seconds_count{local_rank=~"0|1"} > 0)') == 2
    assert prometheus.value("hiera_datagrams_malformed_total") == 0
    assert prometheus.value('hiera_run_info{workers="2", nodes="1", global_batch="8"}') == 1
    assert prometheus.value('hiera_build_info{torch!="none"}') == 1
    rate = wait_for(lambda: prometheus.value("job:hiera_samples:rate2m"))
    assert 0 < rate < 1000
    step = wait_for(lambda: prometheus.value("job:hiera_step_seconds:p50_5m"))
    # Workers sleep 50 ms a step; a busy machine takes longer, but not minutes.
    assert 0.025 < step < 10
    groups = prometheus.get("rules")["groups"]
    assert sum(len(group["rules"]) for group in groups) == 11
    assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok"}


def test_every_query_of_the_dashboard_is_valid(prometheus: Prometheus) -> None:
    prometheus.value("hiera_step")
    dashboard = json.loads((MONITORING / "grafana" / "hiera-train.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    assert len(expressions) > 20
    for expression in expressions:
        query = expression.replace("$job", ".*").replace("$__rate_interval", "1m")
        assert prometheus.get("query", query=query) is not None, expression
