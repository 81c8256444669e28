"""torchx: the same texts through its Runner and through its own command line, and what the local scheduler does.

Needs torchx and not torch; CI runs this file with the pinned torchx and with the current nightly.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torchx", reason="torchx is optional")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

from service.cli import main  # noqa: E402
from service.cluster import app as apps  # noqa: E402
from service.cluster import component, front, kubernetes, slurm, slurm_client, torchx_slurm  # noqa: E402
from service.errors import EXIT_CONFIG, UserError  # noqa: E402
from tests.cluster.golden import HOSTILE, job  # noqa: E402

ROOT = Path(__file__).parents[2]
SETTINGS = ("cluster.node_type=h100-8", "cluster.environment={A: '$x ${app_id} , $$'}", "run.dir=/r/$$x")


@pytest.fixture
def runner():
    with front.make_runner() as made:
        yield made


def app(**arguments):
    return component.train(*SETTINGS, config="base", **arguments)


def test_our_schedulers_send_what_render_prints(runner):
    wanted = job({"nodes": 4}, SETTINGS)
    dryrun = runner.dryrun(app(nodes=4), "hiera_slurm")
    assert str(dryrun).rstrip("\n") == slurm.render(wanted).rstrip("\n")
    dryrun = runner.dryrun(app(nodes=4), "hiera_kubernetes")
    assert str(dryrun).rstrip("\n") == kubernetes.render(wanted).rstrip("\n")


def test_an_app_may_be_given_to_one_scheduler_after_the_other(runner):
    """torchx writes into the roles it is given; what a call needs is taken from a copy of its own."""
    one = app(nodes=2)
    first = str(runner.dryrun(one, "hiera_slurm"))
    runner.dryrun(one, "local_cwd", cfg={"log_dir": "/tmp"})
    assert str(runner.dryrun(one, "hiera_slurm")) == first
    assert str(runner.dryrun(app(nodes=2), "hiera_slurm")) == first


def test_options_of_the_scheduler_override_the_configuration(runner):
    text = str(runner.dryrun(app(), "hiera_slurm", cfg={"partition": "a b", "time": "7"}))
    assert '#SBATCH --partition="a b"' in text
    assert "#SBATCH --time=7\n" in text


def test_seeds_and_dependencies_arrive(runner):
    text = str(runner.dryrun(app(seeds="3,4", after="9"), "hiera_slurm"))
    assert "seeds=(3 4)" in text
    assert "--dependency=afterok:9" in text


def test_other_components_are_refused(runner):
    specs = pytest.importorskip("torchx.specs")
    role = specs.Role(name="x", image="", entrypoint="true", resource=specs.Resource(cpu=1, gpu=0, memMB=1))
    with pytest.raises(UserError, match="hiera-train's component only"):
        runner.dryrun(specs.AppDef(name="x", roles=[role]), "hiera_slurm")


def test_local_arguments_arrive_as_they_are(runner):
    overrides = (f"data.path=/x {HOSTILE}".replace("$", "$$"), "data.kind=array")
    made = component.train(*overrides, config="base", nodes=2)
    request = runner.dryrun(made, "local_cwd", cfg={"log_dir": "/tmp"}).request
    replicas = request.role_params["trainer"]
    assert len(replicas) == 2
    for rank, replica in enumerate(replicas):
        assert replica.args[1:4] == ["run", "--config", str(ROOT / "configs/base.yaml")]
        assert replica.args[4:6] == ["--set", overrides[0]]
        assert replica.args[-2:] == ["--node-rank", str(rank)]


# torchx's own command line


@pytest.fixture
def plugins(tmp_path):
    """A directory for PYTHONPATH that declares what pyproject.toml does, whatever was installed when."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    information = tmp_path / "plugins/hiera_train-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: hiera-train\nVersion: 1\n")
    sections = [
        "\n".join([f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())])
        for group, entries in declared.items()
    ]
    (information / "entry_points.txt").write_text("\n".join(sections) + "\n")
    return information.parent


def torchx(plugins, *arguments, cwd):
    # What this process has in its path comes along: another torchx, say.
    path = os.pathsep.join(filter(None, [str(plugins), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TORCHX_INTERNAL_SESSION_ID": "x"}
    code = "import sys; from torchx.cli.main import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_torchx_s_own_command_line_gives_docker_the_image_s_entry_point_once(plugins, tmp_path):
    arguments = ["run", "--dryrun", "-s", "local_docker", "hiera.train", "--config", "base"]
    done = torchx(plugins, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # YAML with tags of torchx's own classes.
    command = done.stdout.split("SCHEDULER REQUEST")[1].split("command:\n")[1].split(": ")[0]
    words = [line.strip().removeprefix("- ") for line in command.splitlines()]
    assert words[:3] == ["run", "--config", f"{ROOT}/configs/base.yaml"]


@pytest.mark.parametrize(("scheduler", "renderer"), [("hiera_slurm", slurm), ("hiera_kubernetes", kubernetes)])
def test_torchx_s_own_command_line_sends_the_same(plugins, tmp_path, scheduler, renderer):
    arguments = ["run", "--dryrun", "-s", scheduler, "hiera.train", "--config", "base", "--nodes", "2"]
    done = torchx(plugins, *arguments, *SETTINGS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert renderer.render(job({"nodes": 2}, SETTINGS)).rstrip("\n") in done.stdout


# Our own command line


def test_dry_run_of_submit_is_render(capsys):
    arguments = ["--config", "base", "--nodes", "2"]
    for scheduler in ("slurm", "kubernetes"):
        assert main(["render", scheduler, *arguments]) == 0
        rendered = capsys.readouterr().out
        assert main(["submit", "--on", scheduler, "--dry-run", *arguments]) == 0
        assert capsys.readouterr().out == rendered


def test_without_torchx_render_still_works_and_submit_says_what_to_install():
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torchx':\n"
        "            raise ModuleNotFoundError('no', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from service.cli import main\n"
        "assert main(['submit', '--on', 'slurm', '--dry-run', '--config', 'base']) == 0\n"
        "sys.exit(main(['list', '--on', 'slurm']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == EXIT_CONFIG
    assert done.stderr.startswith("hiera-train: error: torchx is not installed: pip install 'torchx>=0.7,<0.9'")
    assert "#SBATCH" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "17"], "'17' is not a handle that submit printed"),
        (["cancel", "slurm://x/17"], "'slurm://x/17' is not a handle that submit printed"),
        (["logs", "local_cwd://hiera-train/x"], "a local run ends with its submit"),
        (["submit", "--on", "slurm", "--config", "base"], "data.path: null; give the training data"),
        (["submit", "--on", "docker", "--config", "base", "--nodes", "2"], "--nodes: docker runs one node"),
        (["submit", "--config", "base"], "the following arguments are required: --on"),
        (["submit", "--on", "local", "--config", "base", "--seeds", "1,2"], "only Slurm has job arrays"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, message):
    assert main(arguments) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert error.startswith("hiera-train: error: ")
    assert message in error
    assert error.count("\n") == 1


LAUNCHER = """#!/bin/bash
echo "$@" >"$0.arguments.$NODE"
echo "hello from a launcher"
exit 78
"""


def test_submit_on_local_runs_in_the_foreground(monkeypatch, tmp_path, capfd):
    launcher = tmp_path / "hiera-train"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(apps, "command", lambda: str(launcher))
    code = main(["submit", "--on", "local", "--config", "base", "--set", "cluster.gpus_per_node=0"])
    captured = capfd.readouterr()
    assert code == 1
    assert captured.out.startswith("local_cwd://hiera-train/hiera-base-")
    assert "hello from a launcher" in captured.err
    arguments = (tmp_path / "hiera-train.arguments.").read_text()
    assert arguments == f"run --config {ROOT}/configs/base.yaml --set cluster.gpus_per_node=0\n"


def test_a_local_run_is_stopped_with_its_submit(monkeypatch, tmp_path):
    launcher = tmp_path / "hiera-train"
    launcher.write_text("#!/bin/bash\ntrap 'echo asked >\"$0.asked\"; exit 75' TERM\necho up\nsleep 60 & wait\n")
    launcher.chmod(0o755)
    code = (
        "import sys; from service.cli import main; from service.cluster import app\n"
        f"app.command = lambda: {str(launcher)!r}\n"
        "sys.exit(main(['submit', '--on', 'local', '--config', 'base']))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
    ) as process:
        seen = ""
        while "up\n" not in seen:
            seen += process.stderr.readline()
        process.terminate()
        rest = process.stderr.read()
        assert process.wait(30) == 75
    assert "hiera-train: stopping the run: SIGTERM\n" in rest
    assert "Traceback" not in rest
    assert (tmp_path / "hiera-train.asked").exists()


def docker_request(runner, *settings, config="base"):
    made = component.train(*settings, config=str(config))
    (container,) = runner.dryrun(made, "local_docker").request.containers
    return container


def targets(container):
    """Mounted path to whether it is read-only; an engine refuses two mounts of one path."""
    mounts = container.kwargs["mounts"]
    found = {mount["Target"]: mount["ReadOnly"] for mount in mounts}
    assert len(found) == len(mounts), mounts
    return found


def test_docker_gets_mounts_shared_memory_and_the_image_s_entry_point(monkeypatch, tmp_path, runner):
    monkeypatch.chdir(tmp_path)
    caches = ("runtime.cache_seed=/seeds", "runtime.cache_dir=/caches")
    settings = ("data.path=/data/$$x", "cluster.image=hiera:1", "cluster.gpus_per_node=1", *caches)
    container = docker_request(runner, *settings)
    assert container.image == "hiera:1"
    assert container.command[:2] == ["run", "--config"]
    assert container.command[-1] == f"run.dir={tmp_path}/runs/hiera-base"
    assert "data.path=/data/$$x" in container.command
    written = {str(tmp_path / "runs"): False, "/seeds": False, "/caches": False}
    assert targets(container) == {str(ROOT / "configs"): True, "/data/$x": True, **written}
    assert int(container.kwargs["shm_size"].rstrip("m")) > 1000
    assert container.kwargs["user"] == f"{os.getuid()}:{os.getgid()}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Configuration and runs in one folder.
        (["run.dir=exp1"], {".": False}),
        (["run.dir=sub/../exp1"], {".": False}),
        # The configuration inside the data, and with them runs, weights and a cache.
        (["data.path={here}"], {".": True, "runs": False}),
        (["data.path={here}", "data.val_path={here}", "run.dir=exp1"], {".": False}),
        (["runtime.cache_dir={here}/c", "runtime.cache_seed={here}/c", "train.init_from={here}/c"], {"c": False}),
    ],
)
def test_docker_gets_a_path_once_and_writable_where_something_is_written(
    monkeypatch, tmp_path, runner, settings, expected
):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "mine.yaml"
    config.write_text("data: {kind: synthetic}\n")
    container = docker_request(runner, *(setting.format(here=tmp_path) for setting in settings), config="mine.yaml")
    found = targets(container)
    wanted = {str(tmp_path / path): closed for path, closed in expected.items()}
    assert {path: found[path] for path in wanted} == wanted
    assert found[str(tmp_path)] is expected.get(".", True)


def test_the_docker_scheduler_leaves_other_components_alone(runner):
    specs = pytest.importorskip("torchx.specs")
    role = specs.Role(name="x", image="i", entrypoint="echo", args=["run"], resource=specs.Resource(1, 0, 1))
    (container,) = runner.dryrun(specs.AppDef(name="x", roles=[role]), "local_docker").request.containers
    assert container.command == ["echo", "run"]
    assert "user" not in container.kwargs


def test_the_docker_scheduler_makes_directories_that_are_written_when_it_starts(monkeypatch, tmp_path):
    pytest.importorskip("docker")
    from torchx.schedulers.docker_scheduler import DockerScheduler

    from service.cluster import torchx_docker

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DockerScheduler, "schedule", lambda self, info: info.request.app_id)
    scheduler = torchx_docker.create_scheduler("s")
    with front.make_runner() as runner:
        info = scheduler.submit_dryrun(
            component.train(f"runtime.cache_dir={tmp_path}/a/cache", config="base"),
            runner.scheduler_run_opts("local_docker").resolve({}),
        )
    assert scheduler.schedule(info).startswith("hiera-base-")
    assert (tmp_path / "runs").is_dir()
    assert (tmp_path / "a/cache").is_dir()


# Slurm's answers, when Slurm has no accounting, has accounting, and has forgotten the job


class Answers:
    """Pretended commands of Slurm: first words of the command line to output, or to what stderr says."""

    def __init__(self, monkeypatch, tmp_path):
        self.outputs, self.errors, self.calls = {}, {}, []
        monkeypatch.setattr(slurm_client, "call", self)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def __call__(self, *command, text=None):
        self.calls.append((command, text))
        if command[0] in self.errors:
            raise UserError(self.errors[command[0]])
        return self.outputs.get(command[0], "")


SHOWN = """JobId=5 JobName=x Restarts=99 WorkDir=/no
   UserId=u(1) Priority=1
   Requeue=1 Restarts=2 BatchFlag=1 ExitCode=0:0
   WorkDir={work}
   Comment=hiera-train:lo%20gs
   StdErr=/x
"""


@pytest.fixture
def answers(monkeypatch, tmp_path):
    return Answers(monkeypatch, tmp_path / "state")


def test_status_from_the_controller_alone(answers, tmp_path):
    work = f"{tmp_path}/a b\n   c"
    answers.outputs = {
        "squeue": "5|FAILED|NonZeroExitCode|5|hiera-train:lo%20gs\n",
        "scontrol": SHOWN.format(work=work),
    }
    logs = Path(work) / "lo gs/5"
    logs.mkdir(parents=True)
    (logs / "exit-code").write_text("70\n")
    found = torchx_slurm.create_scheduler("s").describe("5")
    assert (found.state.name, found.num_restarts) == ("FAILED", 2)
    assert found.msg == f"FAILED (NonZeroExitCode), exit code 70, logs in {logs}"


def test_status_from_accounting(answers, tmp_path):
    answers.errors = {"squeue": "slurm_load_jobs error: Invalid job id specified"}
    answers.outputs = {"sbatch": "5\n", "sacct": "5|CANCELLED by 0\n"}
    slurm_client.submit("#!/bin/bash\n", str(tmp_path / "logs"))
    found = torchx_slurm.create_scheduler("s").describe("5")
    assert found.state.name == "CANCELLED"
    assert str(tmp_path / "logs/5") in found.msg


@pytest.mark.parametrize(("code", "state"), [("0", "SUCCEEDED"), ("78", "FAILED"), (None, "UNKNOWN")])
def test_status_when_slurm_has_forgotten_and_keeps_no_accounts(answers, tmp_path, code, state):
    answers.errors = {"squeue": "slurm_load_jobs error: Invalid job id specified", "sacct": "disabled"}
    answers.outputs = {"sbatch": "5;cluster\n"}
    assert torchx_slurm.create_scheduler("s").describe("5") is None
    assert slurm_client.submit("#!/bin/bash\n", str(tmp_path / "logs")) == "5"
    (tmp_path / "logs/5").mkdir(parents=True)
    if code is not None:
        (tmp_path / "logs/5/exit-code").write_text(code)
    assert torchx_slurm.create_scheduler("s").describe("5").state.name == state


def test_a_controller_that_does_not_answer_is_not_a_forgotten_job(answers):
    answers.errors = {"squeue": "squeue: error: Unable to contact slurm controller"}
    with pytest.raises(UserError, match="Unable to contact"):
        torchx_slurm.create_scheduler("s").describe("5")


def test_an_array_is_what_its_tasks_are(answers):
    line = "7_{}|{}|None|7|hiera-train:logs\n"
    answers.outputs = {"scontrol": SHOWN.format(work="/w")}
    for states, together in (
        (("COMPLETED", "FAILED"), "FAILED"),
        (("COMPLETED", "RUNNING"), "RUNNING"),
        (("COMPLETED", "COMPLETED"), "SUCCEEDED"),
        (("FAILED", "PENDING"), "PENDING"),
    ):
        answers.outputs["squeue"] = "".join(line.format(*pair) for pair in enumerate(states))
        assert torchx_slurm.create_scheduler("s").describe("7").state.name == together


def test_only_our_jobs_are_listed(answers):
    answers.outputs = {"squeue": "1|RUNNING|None|1|(null)\n2|PENDING|Priority|2|hiera-train:logs\n"}
    assert [(a.app_id, a.state.name) for a in torchx_slurm.create_scheduler("s").list()] == [("2", "PENDING")]


def test_following_a_log_ends_with_the_job_and_misses_nothing(answers, tmp_path, monkeypatch):
    monkeypatch.setattr(torchx_slurm, "POLL_SECONDS", 0)
    logs = tmp_path / "logs/5"
    logs.mkdir(parents=True)
    states = iter(["RUNNING", "RUNNING", "RUNNING", "COMPLETED", "COMPLETED"])
    texts = iter(["a\nb", "b\nä", "\nlast", ""])

    def find(job):
        with (logs / "node-1.log").open("a") as file:
            file.write(next(texts, ""))
        return [slurm_client.Entry("5", next(states), "", 0, logs)]

    monkeypatch.setattr(slurm_client, "find", find)
    lines = torchx_slurm.create_scheduler("s").log_iter("5", "trainer", 1, should_tail=True)
    assert list(lines) == ["a\n", "bb\n", "ä\n", "last"]
