"""State files, run directories, locks and process bookkeeping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from service.config.schema import RunConfig
from service.errors import UserError
from service.files import replacing
from service.launch import processes, rundir, state, worker


def test_round_trip_and_garbage(tmp_path: Path) -> None:
    assert state.read_state(tmp_path, 3) is None
    written = state.State("failed", 7, "why", 70, "a1", 1.5)
    state.write_state(tmp_path, 3, written)
    assert state.read_state(tmp_path, 3) == written
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["node-3.json"]
    for text in ("", "{", "[]", '{"status": "odd"}', json.dumps({"status": "failed"})):
        state.state_path(tmp_path, 3).write_text(text)
        assert state.read_state(tmp_path, 3) is None


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker's environment."""
    monkeypatch.setenv(state.RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv(state.ATTEMPT_VARIABLE, "now")
    monkeypatch.setenv(state.NODE_RANK_VARIABLE, "0")
    monkeypatch.delenv(worker.STOP_FILE_VARIABLE, raising=False)
    return tmp_path


def code(directory: Path) -> tuple[str, int]:
    now = state.read_state(directory, 0)
    assert now is not None
    return now.status, now.exit_code


def test_a_final_outcome_is_kept(attempt: Path) -> None:
    assert state.report("running")
    assert state.report("failed", reason="rank 1: connection reset")
    assert code(attempt) == ("failed", 1)
    assert state.report("failed", reason="non-finite", exit_code=70)
    assert not state.report("failed", reason="echo")
    assert not state.report("running")
    assert code(attempt) == ("failed", 70)


def test_an_older_attempt_is_not(attempt: Path) -> None:
    state.write_state(attempt, 0, state.State("finished", 9, "", 0, "before", time.time()))
    assert not worker.is_over(attempt, 0)
    assert state.report("running")
    assert code(attempt)[0] == "running"


def test_report_outside_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(state.ATTEMPT_VARIABLE, raising=False)
    assert not state.report("finished")


def test_full_disk_is_said_and_survived(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    state.report("running")
    monkeypatch.setattr(os, "fsync", full)
    assert not state.report("finished")
    assert "No space left" in capsys.readouterr().err
    assert code(attempt)[0] == "running"
    assert len(list((attempt / "state").iterdir())) == 1


def test_a_signal_before_training_has_its_handlers_is_not_lost(attempt: Path) -> None:
    """It comes while the training module is looked for; the launcher finds the stop file and sends it again."""
    (attempt / "early.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n")
    stop = attempt / "stop"
    environment = os.environ | {"LOCAL_RANK": "1", worker.STOP_FILE_VARIABLE: str(stop), "PYTHONPATH": str(attempt)}
    environment.pop(processes.PARENT_VARIABLE, None)
    command = [sys.executable, "-m", "service.launch.worker", "early"]
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert stop.exists()


def test_a_torch_that_cannot_be_imported_is_one_line(attempt: Path) -> None:
    (attempt / "torch.py").write_text("raise ImportError('libtorch.so: cannot map\\nmore')\n")
    environment = os.environ | {"PYTHONPATH": str(attempt)}
    environment.pop(processes.PARENT_VARIABLE, None)
    command = [sys.executable, "-m", "service.launch.agent"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.stderr == ""
    now = state.read_state(attempt, 0)
    assert now is not None
    assert (now.status, now.reason) == (
        "failed",
        "torch cannot be imported on this machine: libtorch.so: cannot map",
    )


@pytest.mark.parametrize(("restarts", "starts"), [(0, True), (1, False)])
def test_a_stop_between_the_starts_of_two_ranks_lets_none_wait(attempt: Path, restarts: int, starts: bool) -> None:
    """The ranks agree on the stop once all are there; started again, they have nothing to do."""
    (attempt / "late.py").write_text("raise SystemExit(9)\n")
    (attempt / "stop").touch()
    environment = os.environ | {
        "LOCAL_RANK": "1",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        worker.STOP_FILE_VARIABLE: str(attempt / "stop"),
        "PYTHONPATH": str(attempt),
    }
    environment.pop(processes.PARENT_VARIABLE, None)
    command = [sys.executable, "-m", "service.launch.worker", "late"]
    assert subprocess.run(command, env=environment, check=False).returncode == (9 if starts else 0)


def test_workers_do_not_start_when_all_is_over(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not worker.is_over(attempt, 0)
    monkeypatch.setenv(worker.STOP_FILE_VARIABLE, str(attempt / "stop"))
    assert not worker.is_over(attempt, 0, stop_file=True)
    (attempt / "stop").touch()
    assert worker.is_over(attempt, 0, stop_file=True)
    assert not worker.is_over(attempt, 0)
    state.report("stopped", step=4)
    assert worker.is_over(attempt, 0)


def config(directory: Path, **sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({"run": {"dir": directory}, "data": {"kind": "synthetic"}, **sections})


def test_run_yaml_is_written_once_and_compared(tmp_path: Path) -> None:
    assert rundir.bind_config(tmp_path, config(tmp_path))
    assert not rundir.bind_config(tmp_path, config(tmp_path))
    with pytest.raises(UserError, match=r"optim\.weight_decay: 0\.05 -> 0\.1"):
        rundir.bind_config(tmp_path, config(tmp_path, optim={"weight_decay": 0.1}))
    # What may change does, and is what the workers read next.
    assert not rundir.bind_config(tmp_path, config(tmp_path, train={"log_every": 7}))
    assert "log_every: 7" in (tmp_path / "run.yaml").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("moment", ["fsync", "link"])
def test_two_nodes_with_one_process_id_write_run_yaml_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The other node, whose launcher has the same id in its container, writes at the worst moment."""
    real = getattr(os, moment)

    def and_the_other(*arguments: object) -> None:
        monkeypatch.setattr(os, moment, real)
        real(*arguments)
        rundir._write_new(tmp_path / "run.yaml", "other\n")

    monkeypatch.setattr(os, moment, and_the_other)
    first = rundir._write_new(tmp_path / "run.yaml", "first\n")
    assert first == (moment == "link")
    assert (tmp_path / "run.yaml").read_text() == ("first\n" if first else "other\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_two_processes_with_one_id_replace_a_file_together(tmp_path: Path) -> None:
    with replacing(tmp_path / "file") as one:
        one.write_text("one")
        with replacing(tmp_path / "file") as two:
            two.write_text("two")
        assert (tmp_path / "file").read_text() == "two"
    assert (tmp_path / "file").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_broken_run_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a: [")
    with pytest.raises(UserError, match="does not describe a run"):
        rundir.bind_config(tmp_path, config(tmp_path))
    (tmp_path / "run.yaml").unlink()
    (tmp_path / "run.yaml").mkdir()
    with pytest.raises(UserError, match=r"run\.yaml cannot be written \(Is a directory\)"):
        rundir.bind_config(tmp_path, config(tmp_path, checkpoint={"allow_changes": True}))
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_unwritable_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.dir: .*cannot be written"):
        rundir.make_run_directory(tmp_path / "file" / "run")


def test_private_directory_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    first = rundir.private_directory(tmp_path, 0)
    assert first.stat().st_mode & 0o777 == 0o700
    (first / "stop").touch()
    assert rundir.private_directory(tmp_path, 0) == first
    assert list(first.iterdir()) == []
    other = rundir.private_directory(tmp_path, 1)
    assert other != first
    other.rmdir()
    # A link that somebody planted is left alone.
    first.rmdir()
    first.symlink_to(tmp_path)
    elsewhere = rundir.private_directory(tmp_path, 0)
    assert elsewhere != first
    assert first.is_symlink()
    elsewhere.rmdir()
    first.unlink()


def test_one_launcher_a_directory(tmp_path: Path) -> None:
    with rundir.locked(tmp_path, 1, 0):
        in_use = pytest.raises(UserError, match=f"in use by another live run .pid {os.getpid()} on")
        with in_use, rundir.locked(tmp_path, 1, 0):
            pass
        with rundir.locked(tmp_path, 2, 0), rundir.locked(tmp_path, 2, 1):
            pass
    with rundir.locked(tmp_path, 1, 0):
        pass


def test_waits_for_workers_of_an_earlier_launch(tmp_path: Path) -> None:
    held = rundir.hold_worker_lock(tmp_path, 1, 0)
    assert held is not None
    with pytest.raises(UserError, match="workers of an earlier run"), rundir.locked(tmp_path, 1, 0, 0.2):
        pass
    os.close(held)
    with rundir.locked(tmp_path, 1, 0, 0.2):
        pass


def test_kill_marked_takes_adopted_processes_and_only_those(tmp_path: Path) -> None:
    code = (
        "import subprocess, time, sys; from service.launch import processes as p\n"
        "p.adopt_orphans()\n"
        "mark = {'MARK': 'x'}\n"
        "other = subprocess.Popen(['sleep', '60'], env={'PATH': '/usr/bin:/bin'})\n"
        # A shell that starts a session of its own and leaves it behind.
        "subprocess.run(['sh', '-c', 'setsid sleep 60 & exit'], env={'PATH': '/usr/bin:/bin', **mark})\n"
        "time.sleep(0.3)\n"
        "before = len(p.descendants(p.os.getpid()))\n"
        "assert p.kill_marked('MARK', 'x') == []\n"
        "after = p.descendants(p.os.getpid())\n"
        "print(before, after == {other.pid}); other.kill()"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["2", "True"]


def test_child_dies_with_its_parent(tmp_path: Path) -> None:
    child = (
        "from service.launch import processes as p; p.die_with_parent(); "
        "import pathlib, os, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    while pid in processes.parents():
        assert time.monotonic() < deadline
        time.sleep(0.02)
