"""Training on a real Slurm of three nodes: to the end, through time limits and lost nodes.

Where something has to happen in the middle of a run, its workers are paused, so that neither a fast nor a
slow machine decides the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.system.slurm_host import DEADLINE, needs_slurm, wait_for
from tests.system.slurm_lab import SlurmLab
from tests.system.slurm_runs import HOSTILE, STEPS, Place, hiera_train, job_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(2400), needs_slurm]


def events(run: Path) -> list[dict[str, float]]:
    """The record of a run without what depends on the clock."""
    clock = {"time", "samples_per_second", "data_wait_seconds"}
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def assert_same_run(run: Path, other: Path) -> None:
    """Both runs saw the same samples with the same masks: every loss and weight has the same bits."""
    torch = pytest.importorskip("torch")
    from service.train.checkpoint import list_checkpoints, load_tensors

    assert events(run) == events(other)
    one, two = (load_tensors(list_checkpoints(path / "checkpoints")[-1][1]) for path in (run, other))
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@contextlib.contextmanager
def paused(lab: SlurmLab, run: Path, step: int = 30):
    """Stop all workers of a run as soon as it is past a step; they go on at the end of the block."""

    def past() -> bool:
        return (run / "metrics.jsonl").exists() and any(e["step"] >= step for e in events(run))

    def workers() -> list[int]:
        return [int(line.split()[0]) for line in lab.processes(f"--run-dir {run}") if "agent" not in line]

    wait_for(past, f"for step {step}", interval=0.02)
    stopped = workers()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert len(stopped) == 4, lab.processes(str(run))
    try:
        yield
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def reference(lab):
    """A run to the end, with hostile names everywhere, in whose middle slurmctld is restarted."""
    place = Place(lab, lab.directory / HOSTILE)
    handle = place.submit({"cluster.environment": json.dumps({"HOSTILE": HOSTILE})}, "--name", HOSTILE + " \x01end")
    job = job_of(handle)
    with paused(lab, place.directory / "runs/hiera-base"):
        listed = place.hiera("list", "--on", "slurm").stdout
        status = place.hiera("status", handle).stdout
        lab.stop_controller()
        lab.start_controller()
    follow = place.hiera("logs", handle, "--follow").stdout
    lab.wait_job(job, "COMPLETED")
    return place, handle, listed, status, follow


def test_trains_to_the_end_wherever_it_is_and_whatever_it_is_called(lab, reference):
    place, handle, listed, status, follow = reference
    run = place.directory / "runs/hiera-base"
    assert [event["step"] for event in events(run) if "loss" in event] == list(range(10, STEPS + 1, 10))
    assert f"RUNNING    {handle}\n" in listed
    assert status.startswith(f"RUNNING  {handle}\n")
    # A restart of the controller in the middle is not noticed.
    assert f"finished at step {STEPS}" in follow
    done = place.hiera("status", handle).stdout
    assert done.startswith(f"SUCCEEDED  {handle}\n")
    assert "exit code 0" in done
    assert place.hiera("logs", handle, "--node", "1").stdout.count("node 1 of 2") == 1
    name = lab.run("squeue", "-h", "-t", "all", "-j", job_of(handle), "-o", "%j")
    assert name == HOSTILE.replace("\n", " ") + "  end\n"


def test_time_limit_saves_requeues_and_resumes(place, reference):
    handle = place.submit()
    job, run = job_of(handle), place.directory / "runs/hiera-base"
    with paused(place.lab, run):
        place.lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        output = place.directory / f"slurm-{job}.out"
        wait_for(lambda: "asked to save and stop" in output.read_text(), "for the signal")
    wait_for(lambda: place.lab.job(job).get("Restarts") == "1", "for the requeue")
    place.lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    place.lab.wait_job(job, "COMPLETED")
    assert "stopped at step" in place.log(job)
    assert "resuming from" in place.log(job)
    assert "restarts: 1" in place.hiera("status", handle).stdout
    assert_same_run(run, reference[0].directory / "runs/hiera-base")


@pytest.mark.parametrize("how", ["silently", "set down"])
def test_a_lost_node_is_replaced(place, reference, how):
    lab = place.lab
    lost = "node2"

    def lose() -> None:
        if how == "silently":
            lab.kill_node(lost)
        else:
            lab.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")

    def find() -> None:
        if how == "silently":
            lab.heal(lost)
            lab.start_node(lost)
        lab.run("scontrol", "update", f"NodeName={lost}", "State=RESUME", check=False)
        lab.wait_idle()

    with lab.quick_loss() if how == "silently" else contextlib.nullcontext():
        # Workers that wait for a dead node cannot stop in good order: the launcher need not wait for them long.
        job = job_of(place.submit({"runtime.grace_seconds": "5"}))
        run = place.directory / "runs/hiera-base"
        with paused(lab, run):
            assert lab.job(job)["NodeList"] == "node[1-2]"
            lose()
            try:
                wait_for(lambda: lab.job(job).get("Restarts") == "1", "for the requeue")
            except AssertionError:
                find()
                raise
        try:
            assert lab.wait_job(job, "COMPLETED")["NodeList"] == "node[1,3]"
        finally:
            find()
    assert_same_run(run, reference[0].directory / "runs/hiera-base")


def test_cancel_saves_and_leaves_nothing(place):
    handle = place.submit()
    job, run = job_of(handle), place.directory / "runs/hiera-base"
    with paused(place.lab, run):
        place.hiera("cancel", handle)
    place.lab.wait_job(job, "CANCELLED")
    place.lab.wait_idle()
    wait_for(lambda: not place.lab.processes(str(run)), "for the processes to end")
    # Cancelled is not requeued, although the launchers say "run me again".
    output = (place.directory / f"slurm-{job}.out").read_text()
    assert re.search(rf"job {job} ended: saved and stopped, JobState=(CANCELLED|COMPLETING) \(exit code 75\)", output)
    assert place.lab.job(job)["JobState"] == "CANCELLED"
    assert "stopped at step" in place.log(job)
    assert place.hiera("status", handle).stdout.startswith(f"CANCELLED  {handle}\n")


def test_two_jobs_on_the_same_nodes_as_another_user(place):
    """Ports, caches and directories do not collide; nobody has neither a home nor rights here."""
    lab, uid = place.lab, 65534
    place.directory.chmod(0o777)
    base = ["env", f"HOME={place.directory}", *hiera_train("submit", "--on", "slurm")]
    jobs = []
    for name in ("one", "two"):
        settings = {"run.name": name, "train.steps": "20", "cluster.slurm.extra": "'--nodelist=node[1-2]'"}
        settings["runtime.cache_dir"] = str(place.directory / "cache")
        process = lab.on_node("node3", *base, *place.arguments(settings), uid=uid, cwd=place.directory)
        output, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, output
        jobs.append(job_of(output.strip().splitlines()[-1]))
    wait_for(lambda: all(lab.job(job)["JobState"] != "PENDING" for job in jobs), "for both to start")
    for job in jobs:
        found = lab.wait_job(job, "COMPLETED", "FAILED")
        assert found["JobState"] == "COMPLETED", place.log(job)
        assert (found["NodeList"], found["UserId"]) == ("node[1-2]", f"nobody({uid})")
    rendezvous = {re.search(r"rendezvous (\S+)", place.log(job)).group(1) for job in jobs}
    assert len(rendezvous) == 2
