"""docs/scale.md says what the simulation counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from service.launch.rendezvous import MANY_NODES, timing

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")


def test_the_simulation_runs_and_counts_the_series_of_the_page():
    pytest.importorskip("torch")
    command = [sys.executable, "benchmarks/cluster/simulate.py", "--nodes", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = re.findall(r"^\| 2 \| (\d+) \| .*\| ([\d.]+) s \|$", done.stdout, re.MULTILINE)
    assert f"\n| 2 | {row[0]} |" in PAGE
    # Every node has the same, so the page's other counts are multiples of it.
    counts = {
        int(nodes): int(series.replace(",", "")) for nodes, series in re.findall(r"\n\| (\d+) \| ([\d,]+) \|", PAGE)
    }
    assert counts == {nodes: nodes * int(row[0]) // 2 for nodes in (2, 16, 64, 128, 256)}


def test_the_page_tells_the_timing_of_the_rendezvous():
    many = timing(MANY_NODES + 1)
    text = " ".join(PAGE.split())
    assert f"torch's own up to {MANY_NODES}, above that a heartbeat every {many['keep_alive_interval']} s" in text
    assert f"that may itself take {many['heartbeat_timeout']} s, and {many['read_timeout']} s for an answer" in text
    lost = many["keep_alive_interval"] * many["keep_alive_max_attempt"]
    assert f"after 15 s up to {MANY_NODES} nodes, after {lost} s above" in text
