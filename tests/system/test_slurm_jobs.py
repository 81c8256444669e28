"""Jobs on a real Slurm of three nodes, without training: a launcher that only says what it got."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import readme
from tests.system.slurm_host import needs_slurm, sweep, wait_for
from tests.system.slurm_runs import HOSTILE, job_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(2400), needs_slurm]

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
    done = place.hiera("submit", "--on", "slurm", *place.arguments(settings), check=False)
    assert done.returncode == 78
    assert done.stderr.startswith("hiera-train: error: sbatch: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_job_that_has_to_wait_says_why(place, stub):
    handle = place.submit(stub(cluster__nodes="4"))
    wait_for(lambda: "PENDING (Partition" in place.hiera("status", handle).stdout)


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


def test_the_readme_s_commands(place, stub):
    """Word for word, except that there are fewer nodes and GPUs here."""
    stub()
    venv = place.directory / "venv"
    install, *commands = readme.commands("Slurm", {"VIRTUAL_ENV": str(venv)})
    assert install == ["pip", "install", ".[torchx]"]
    handle, said = "", {}
    for program, name, *words in commands:
        assert program == "hiera-train"
        if name == "submit":
            words[words.index("--nodes") + 1] = "2"
            words += ["--set", "cluster.gpus_per_node=2", "--set", "cluster.environment={WANTED: '0'}"]
        said[name] = place.hiera(
            name, *(handle if word.startswith("hiera_slurm://") else word for word in words)
        ).stdout
        if name == "submit":
            handle = said[name].strip()
    assert list(said) == ["submit", "status", "logs", "list", "cancel"]
    assert "gpus 0,1" in said["logs"]
    assert handle in said["list"]
    assert place.hiera("status", handle).stdout.startswith(f"SUCCEEDED  {handle}\n")
    arguments = (place.directory / f"arguments-{job_of(handle)}-1").read_text().split("\0")
    assert arguments[:2] == ["run", "--config"]


APPTAINER = """#!/bin/bash
[ "$1" = exec ] || exit 3
shift
while [[ $1 == --* ]]; do
    echo "option $1"
    if [[ $1 == --bind=* ]]; then
        source=${1#--bind=}
        [ -e "${source%%:*}" ] || { echo "no ${source%%:*} on this node"; exit 255; }
    fi
    shift
done
echo "image $1"
shift
exec "$@"
"""


def test_a_container_runs_in_each_task_and_the_script_outside(place, stub):
    """A pretended apptainer; that the job is requeued shows that scontrol is not asked for in there."""
    # /dev/shm is each node's own, and where a mount's source is missing apptainer fails.
    cache = f"/dev/shm/it's {place.directory.name}/cache"
    settings = stub(75, cluster__slurm__container="apptainer", cluster__image="hiera.sif", runtime__cache_dir=cache)
    apptainer = place.directory / "venv/bin/apptainer"
    apptainer.write_text(APPTAINER)
    apptainer.chmod(0o755)
    job = job_of(place.submit({**settings, "cluster.slurm.max_requeues": "1"}))
    place.lab.wait_job(job, "FAILED")
    for node in (0, 1):
        log = place.log(job, f"node-{node}.log")
        assert log.count("image hiera.sif\n") == 2
        assert f"option --bind={place.directory}:{place.directory}\n" in log
        assert f"option --bind={cache}:{cache}\n" in log
    assert "stopped after 1 requeues" in (place.directory / f"slurm-{job}.out").read_text()


KILLED = """
import sys, time
from pathlib import Path
from tests.system.slurm_lab import SlurmLab
with SlurmLab(Path(sys.argv[1]), nodes=1) as lab:
    print(lab.bridge, flush=True)
    time.sleep(600)
"""


def test_a_cluster_whose_tests_are_killed_leaves_nothing(lab, tmp_path):
    """No daemon outlives them; the network is removed by the next cluster."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "lab")]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        bridge = process.stdout.readline().strip()
        assert lab.processes(f"{tmp_path}/lab/slurm.conf")
        process.kill()
    wait_for(lambda: not lab.processes(f"{tmp_path}/lab"), "for the daemons to end")
    networks = [["ip", "netns", "list"], ["ip", "link"]]
    assert all(bridge in lab.run(*command) for command in networks)
    sweep()
    assert not any(bridge in lab.run(*command) for command in networks)
    # A cluster that is in use stays.
    assert all(lab.bridge in lab.run(*command) for command in networks)
