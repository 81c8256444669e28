"""The table of metrics, its page, the dashboard and the rules speak of the same metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.metrics.health import PHASES
from service.metrics.names import BY_NAME, METRICS, PREFIX, markdown

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"


def test_page_is_generated_from_the_table() -> None:
    assert (MONITORING / "METRICS.md").read_text(encoding="utf-8") == markdown()


def test_names_are_unique_and_follow_prometheus() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.endswith("_info") == (metric.kind == "info"), metric.name
        assert metric.labels[0] == "node"
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert metric.help.endswith(".")
        if metric.unit in ("seconds", "bytes", "ratio"):
            assert metric.unit in metric.name


def test_labels_are_bounded() -> None:
    for metric in METRICS:
        if metric.kind != "info":
            assert set(metric.labels) <= {"node", "local_rank"}, metric.name


WANTED = (
    "samples_total samples_per_second step_seconds data_wait_seconds_total loss learning_rate grad_norm "
    "mfu_ratio memory_allocated_bytes memory_reserved_bytes memory_peak_bytes compile_seconds "
    "time_to_first_step_seconds "
    "checkpoint_seconds last_checkpoint_step restarts_total bad_files_total nonfinite_total eta_seconds "
    "progress_ratio build_info run_info"
)


@pytest.mark.parametrize("name", WANTED.split())
def test_what_users_were_promised(name: str) -> None:
    assert name in BY_NAME


def used_metrics(text: str) -> set[str]:
    """Metric names in PromQL, without the suffixes of histograms."""
    found = re.findall(rf"\b{PREFIX}([a-z_]+)\b", text)
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in found}


@pytest.mark.parametrize("file", ["rules.yml", "alerts.yml", "alerts_test.yml", "grafana/hiera-train.json"])
def test_rules_and_dashboard_use_known_metrics(file: str) -> None:
    text = (MONITORING / file).read_text(encoding="utf-8")
    # Names that recording rules make are job:hiera_…:rate…
    used = used_metrics(re.sub(r"\bjob:hiera_[a-z_]+:\w+", "", text))
    assert used
    assert used <= set(BY_NAME)


def test_recorded_names_are_recorded() -> None:
    recorded = set(re.findall(r"record: (\S+)", (MONITORING / "rules.yml").read_text()))
    for file in ("alerts.yml", "alerts_test.yml"):
        assert set(re.findall(r"\bjob:hiera_\w+:\w+", (MONITORING / file).read_text())) <= recorded


def test_workers_send_what_is_in_the_table() -> None:
    train = Path(__file__).resolve().parents[2] / "service" / "train"
    text = "\n".join(path.read_text(encoding="utf-8") for path in train.rglob("*.py"))
    sent = set(re.findall(r"[mM]etrics\.(set|add|observe)\(\s*\"(\w+)\"", text))
    assert sent
    kinds = {"set": "gauge", "add": "counter", "observe": "histogram"}
    for method, name in sent:
        assert BY_NAME[name].kind == kinds[method], name
        assert BY_NAME[name].source == "worker", name
    phases = set(re.findall(r"\.phase\(\s*\"(\w+)\"", text))
    assert phases <= set(PHASES)
