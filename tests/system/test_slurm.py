"""Real runs on a real Slurm of three nodes: to the end, through time limits and lost nodes, and mistakes.

The training runs are 2 nodes x 2 processes over gloo. Where something has to happen in the middle of a
run, its workers are paused, so that neither a fast nor a slow machine decides the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.system.slurm_lab import SlurmLab, missing_programs, wait_for

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(420),
    pytest.mark.skipif(bool(missing_programs()), reason=f"needs {', '.join(missing_programs())}"),
]

HOSTILE = 'it\'s "a" $HOME `id` \\ %j #1, 2;\n second'
STEPS = 100
TINY = {
    "model.input_size": "32,32",
    "model.mask_unit_size": "2,2",
    "model.stages": "1,1",
    "model.q_pool": "1",
    "model.mask_unit_attn": "true,false",
    "model.embed_dim": "16",
    "model.decoder_embed_dim": "32",
    "model.decoder_depth": "1",
    "model.decoder_num_heads": "2",
    "data.kind": "synthetic",
    "data.synthetic_samples": "300",
    "data.threads": "1",
    "optim.lr": "1e-3",
    "optim.warmup_steps": "10",
    "train.global_batch": "8",
    "train.steps": str(STEPS),
    "train.log_every": "10",
    "checkpoint.every_steps": "20",
    "runtime.device": "cpu",
    "runtime.nproc_per_node": "2",
    "runtime.threads": "1",
    "runtime.grace_seconds": "30",
    "metrics.port": "0",
    "cluster.nodes": "2",
    "cluster.gpus_per_node": "0",
    "cluster.slurm.exclusive": "false",
    "cluster.slurm.cpus_per_task": "2",
    "cluster.slurm.mem": "1G",
    "cluster.slurm.time": "10",
    "cluster.slurm.signal_seconds": "60",
    "cluster.slurm.venv": sys.prefix,
}


class Place:
    """A directory to submit from, on the cluster `lab`."""

    def __init__(self, lab: SlurmLab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        directory.mkdir(exist_ok=True)
        self.environment = {**lab.environment, "XDG_STATE_HOME": str(lab.directory / "home")}

    def hiera(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """hiera-train with these arguments, here."""
        done = subprocess.run(
            hiera_train(*arguments),
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def submit(self, settings: dict[str, str] | None = None, *more: str) -> str:
        """Submit the tiny run with other settings; returns the handle."""
        done = self.hiera("submit", "--on", "slurm", *more, *arguments_of(settings))
        handle = done.stdout.strip()
        assert re.fullmatch(r"hiera_slurm://hiera-train/\d+", handle), done.stdout
        return handle

    def log(self, job: str, name: str = "node-0.log") -> str:
        """A log of a job, empty while there is none."""
        path = self.directory / "logs" / job / name
        return path.read_text(errors="replace") if path.exists() else ""


def hiera_train(*arguments: str) -> list[str]:
    """The command line of hiera-train in this interpreter."""
    code = "import sys; from service.cli import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code, *arguments]


def arguments_of(settings: dict[str, str] | None = None) -> list[str]:
    """The tiny run as arguments."""
    merged = {**TINY, "runtime.cache_dir": str(Path(tempfile.gettempdir()) / "hiera-slurm-test-cache")}
    merged.update(settings or {})
    sets = [word for name, value in merged.items() for word in ("--set", f"{name}={value}")]
    # Every default is overridden; base only names a file.
    return ["--config", "base", *sets]


def job_of(handle: str) -> str:
    """Id of the job of a handle."""
    return handle.rsplit("/", 1)[-1]


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

    wait_for(past, 120, f"for step {step}")
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
    made = Place(lab, lab.directory / request.node.name.split("[")[0])
    yield made
    lab.run("scancel", "--state=PENDING", check=False)
    lab.run("scancel", "--state=RUNNING", check=False)


@pytest.fixture(scope="module")
def reference(lab):
    """A run to the end, with hostile names everywhere, in whose middle slurmctld is restarted."""
    place = Place(lab, lab.directory / HOSTILE)
    handle = place.submit({"cluster.environment": json.dumps({"HOSTILE": HOSTILE})}, "--name", HOSTILE + " \x01end")
    job = job_of(handle)
    wait_for(lambda: "step 10/" in place.log(job), 120, "for the first steps")
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
        wait_for(lambda: "asked to save and stop" in output.read_text(), 90, "for the signal")
    wait_for(lambda: place.lab.job(job).get("Restarts") == "1", 60, "for the requeue")
    place.lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    place.lab.wait_job(job, "COMPLETED", seconds=300)
    assert "stopped at step" in place.log(job)
    assert "resuming from" in place.log(job)
    assert "restarts: 1" in place.hiera("status", handle).stdout
    assert_same_run(run, reference[0].directory / "runs/hiera-base")


@pytest.mark.parametrize("how", ["silently", "set down"])
def test_a_lost_node_is_replaced(place, reference, how):
    lab = place.lab
    job = job_of(place.submit({"run.name": how.replace(" ", "-")}))
    run = place.directory / "runs" / how.replace(" ", "-")
    lost = "node2"
    with paused(lab, run):
        assert place.lab.job(job)["NodeList"] == "node[1-2]"
        if how == "silently":
            lab.kill_node(lost)
        else:
            lab.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    try:
        wait_for(lambda: lab.job(job).get("Restarts") == "1", 120, "for the requeue")
        ended = lab.wait_job(job, "COMPLETED")
        assert ended["NodeList"] == "node[1,3]"
    finally:
        if how == "silently":
            lab.heal(lost)
            lab.start_node(lost)
        lab.run("scontrol", "update", f"NodeName={lost}", "State=RESUME", check=False)
    assert_same_run(run, reference[0].directory / "runs/hiera-base")


def test_cancel_saves_and_leaves_nothing(place):
    handle = place.submit()
    job, run = job_of(handle), place.directory / "runs/hiera-base"
    with paused(place.lab, run):
        place.hiera("cancel", handle)
    place.lab.wait_job(job, "CANCELLED")
    place.lab.wait_idle()
    wait_for(lambda: not place.lab.processes(str(run)), 30, "for the processes to end")
    # Cancelled is not requeued, although the launchers say "run me again".
    time.sleep(2)
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
        process = lab.on_node("node3", *base, *arguments_of(settings), uid=uid, cwd=place.directory)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        jobs.append(job_of(output.strip().splitlines()[-1]))
    wait_for(lambda: all(lab.job(job)["JobState"] != "PENDING" for job in jobs), 30, "for both to start")
    for job in jobs:
        found = lab.wait_job(job, "COMPLETED", "FAILED")
        assert found["JobState"] == "COMPLETED", place.log(job)
        assert (found["NodeList"], found["UserId"]) == ("node[1-2]", f"nobody({uid})")
    rendezvous = {re.search(r"rendezvous (\S+)", place.log(job)).group(1) for job in jobs}
    assert len(rendezvous) == 2


# Without training: a launcher that only says what it got.

LAUNCHER = """#!/bin/bash
printf '%s\\0' "$@" >"{directory}/arguments-$SLURM_JOB_ID-$SLURM_NODEID"
printf '%s' "$VALUE" >"{directory}/value-$SLURM_JOB_ID"
echo "gpus $CUDA_VISIBLE_DEVICES cpus $SLURM_CPUS_PER_TASK"
exit "$WANTED"
"""


@pytest.fixture
def stub(place):
    """Settings under which a job runs the launcher above."""
    launcher = place.directory / "venv/bin/hiera-train"
    launcher.parent.mkdir(parents=True, exist_ok=True)
    launcher.write_text(LAUNCHER.format(directory=place.directory))
    launcher.chmod(0o755)

    def settings(code: int = 0, **more: str) -> dict[str, str]:
        environment = {"WANTED": str(code), "VALUE": HOSTILE}
        found = {"cluster.slurm.venv": str(place.directory / "venv")}
        found["cluster.environment"] = json.dumps(environment)
        return {**found, **{name.replace("__", "."): value for name, value in more.items()}}

    return settings


def test_resources_values_and_extra_options_arrive(place, stub):
    more = {"cluster__gpus_per_node": "2", "cluster__slurm__extra": "--nice=5"}
    job = job_of(place.submit(stub(**more)))
    place.lab.wait_job(job, "COMPLETED")
    assert "gpus 0,1 cpus 2" in place.log(job)
    assert (place.directory / f"value-{job}").read_text() == HOSTILE
    assert place.lab.job(job)["Nice"] == "5"


def test_an_array_of_seeds_and_a_job_after_it(place, stub):
    array = place.submit(stub(), "--seeds", "11,12")
    after = place.submit(stub(), "--after", array)
    place.lab.wait_job(job_of(after), "COMPLETED")
    found = place.hiera("status", array).stdout
    assert found.startswith("SUCCEEDED")
    seeds = [
        word
        for path in place.directory.glob("arguments-*-0")
        for word in path.read_text().split("\0")
        if word.startswith("run.seed=")
    ]
    assert sorted(seeds) == ["run.seed=11", "run.seed=12"]
    assert place.hiera("logs", f"{array}_1").stdout.startswith("gpus")
    refused = place.hiera("logs", array, check=False)
    assert "is an array; ask for one task" in refused.stderr


def test_a_wrong_configuration_is_not_run_again(place, stub):
    handle = place.submit(stub(78))
    place.lab.wait_job(job_of(handle), "FAILED")
    done = place.hiera("status", handle, check=False)
    assert done.returncode == 1
    assert "exit code 78" in done.stdout
    assert "restarts" not in done.stdout


def test_a_job_that_always_stops_ends_at_the_limit(place, stub):
    job = job_of(place.submit(stub(75, cluster__slurm__max_requeues="1")))
    found = place.lab.wait_job(job, "FAILED")
    assert (found["Restarts"], found["ExitCode"]) == ("1", "75:0")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"cluster.slurm.partition": "no such"}, "Invalid partition name specified"),
        ({"cluster.slurm.mem": "900G"}, "Requested node configuration is not available"),
        ({"cluster.gpus_per_node": "9"}, "Requested node configuration is not available"),
        ({"cluster.slurm.extra": "--no-such-option"}, "unrecognized option '--no-such-option'"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words_in_one_line(place, settings, reason):
    done = place.hiera("submit", "--on", "slurm", *arguments_of(settings), check=False)
    assert done.returncode == 78
    assert done.stderr.startswith("hiera-train: error: sbatch: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_job_that_has_to_wait_says_why(place, stub):
    handle = place.submit(stub(cluster__nodes="4"))
    wait_for(lambda: "PENDING (Partition" in place.hiera("status", handle).stdout, 20)


def test_jobs_of_others_and_unknown_jobs(place):
    other = place.lab.run("sbatch", "--parsable", "--output=/dev/null", "--wrap", "true").strip()
    assert other not in place.hiera("list", "--on", "slurm").stdout
    unknown = place.hiera("status", "hiera_slurm://hiera-train/999999", check=False)
    assert unknown.stderr == "hiera-train: error: hiera_slurm://hiera-train/999999: no such job\n"


def test_by_hand_as_the_readme_says(place, stub):
    """sbatch slurm/train.sbatch CONFIG, without hiera-train on the machine that submits."""
    script = Path(__file__).parents[2] / "slurm/train.sbatch"
    options = [
        "--nodes=1",
        "--gpus-per-node=1",
        "--time=5",
        f"--export=ALL,PATH={place.directory}/venv/bin:{os.environ['PATH']},WANTED=0",
    ]
    stub()
    arguments = [str(script), "configs/base.yaml", "--set", "data.path=/x y"]
    job = place.lab.run("sbatch", "--parsable", *options, *arguments, cwd=place.directory).strip()
    place.lab.wait_job(job, "COMPLETED")
    got = (place.directory / f"arguments-{job}-0").read_text().split("\0")[:-1]
    assert got == ["run", "--config", "configs/base.yaml", "--set", "data.path=/x y"]
