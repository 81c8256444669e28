"""One Slurm cluster for all tests that need one, and its logs when one of them fails."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.system.slurm_lab import SlurmLab
from tests.system.slurm_runs import Place

LINES = 40
"""Last lines of each log that a failed test shows."""


def pytest_configure(config):
    # A CI that gives up sends SIGTERM, which by itself would leave daemons, namespaces and mounts behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("HIERA_NO_SKIP") and not hasattr(report, "wasxfail"):
        # Where a target has promised the tests, one that cannot run has failed.
        report.outcome = "failed"
    place = getattr(item, "funcargs", {}).get("place")
    if report.failed and place is not None:
        files = [*place.directory.rglob("slurm-*.out"), *place.directory.glob("logs/*/node-*.log")]
        files += [path for path in (place.lab.directory / "log").iterdir() if path.suffix == ".log"]
        for path in sorted(files):
            lines = path.read_text(errors="replace").splitlines()[-LINES:]
            report.sections.append((str(path), "\n".join(lines)))
    return report


@pytest.fixture(scope="session")
def lab():
    # Not below pytest's own directory, which other users may not enter.
    directory = Path(tempfile.mkdtemp(prefix="slurm-lab-"))
    try:
        with SlurmLab(directory) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def place(lab, request):
    lab.wait_idle()
    made = Place(lab, lab.directory / re.sub(r"\W+", "-", request.node.name).strip("-"))
    yield made
    lab.run("scancel", "--state=PENDING", check=False)
    lab.run("scancel", "--state=RUNNING", check=False)
