"""Kill, resume, compare: the same bits and the same record as an uninterrupted run."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from runs import (
    assert_same,
    events_of,
    final_tensors,
    finish,
    make_config,
    make_run,
    start,
    state_of,
    wait_for_step,
    workers_of,
)

from service.train.checkpoint import list_checkpoints

LONG = {"steps": 60, "eval_every": 25}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A finished run of 60 steps by number of ranks."""
    runs: dict[int, Path] = {}

    def get(ranks: int) -> Path:
        if ranks not in runs:
            folder = make_run(tmp_path_factory.mktemp("whole") / str(ranks), make_config(train=LONG))
            code, output = finish(start(folder, ranks))
            assert code == 0, output
            runs[ranks] = folder
        return runs[ranks]

    return get


def test_a_run_ends_with_its_last_checkpoint_and_a_record_of_each_event(uninterrupted):
    folder = uninterrupted(1)
    assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [57, 60]
    events = events_of(folder)
    assert [e["step"] for e in events if "loss" in e] == list(range(4, 61, 4))
    assert [e["step"] for e in events if "val_loss" in e] == [25, 50, 60]
    assert state_of(folder)["status"] == "finished"
    assert state_of(folder)["step"] == 60


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2])
def test_stopped_by_a_signal_and_resumed(tmp_path, uninterrupted, number):
    folder = make_run(tmp_path / "run", make_config(train=LONG))
    process = start(folder)
    wait_for_step(folder, 3)
    process.send_signal(number)
    process.send_signal(number)
    code, output = finish(process)
    assert code == 75, output
    state = state_of(folder)
    assert state["status"] == "stopped"
    assert 3 <= state["step"] < 60
    assert signal.Signals(number).name in state["reason"]
    assert list_checkpoints(folder / "checkpoints")[-1][0] == state["step"]
    code, output = finish(start(folder))
    assert code == 0, output
    assert f"resuming from step-{state['step']:08d}" in output
    assert_same(folder, uninterrupted(1))


def test_two_ranks_stop_together_when_one_gets_the_signal(tmp_path, uninterrupted):
    folder = make_run(tmp_path / "run", make_config(train=LONG))
    process = start(folder, ranks=2)
    wait_for_step(folder, 3)
    os.kill(workers_of(process)[1], signal.SIGUSR1)
    code, output = finish(process)
    # torchrun turns the workers' 75 into 1; the state file has the truth.
    assert code != 0, output
    assert state_of(folder)["status"] == "stopped"
    assert list_checkpoints(folder / "checkpoints")[-1][0] == state_of(folder)["step"]
    code, output = finish(start(folder, ranks=2))
    assert code == 0, output
    assert_same(folder, uninterrupted(2))


def test_two_ranks_killed_twice_in_an_epoch(tmp_path, uninterrupted):
    folder = make_run(tmp_path / "run", make_config(train=LONG))
    for step in (3, 12):
        process = start(folder, ranks=2)
        wait_for_step(folder, step)
        os.killpg(process.pid, signal.SIGKILL)
        for pid in workers_of_or_none(process):
            os.kill(pid, signal.SIGKILL)
        finish(process)
    code, output = finish(start(folder, ranks=2))
    assert code == 0, output
    assert_same(folder, uninterrupted(2))


def workers_of_or_none(process):
    try:
        return [pid for pid in workers_of(process) if pid != process.pid]
    except (FileNotFoundError, ProcessLookupError):
        return []


def test_another_number_of_ranks_goes_on_with_the_same_samples(tmp_path, uninterrupted):
    folder = make_run(tmp_path / "run", make_config(train=LONG))
    process = start(folder, ranks=2)
    wait_for_step(folder, 12)
    os.kill(workers_of(process)[0], signal.SIGTERM)
    finish(process)
    code, output = finish(start(folder))
    assert code == 0, output
    # Sums in another order: equal to rounding, not bitwise. Other samples or masks would differ in the first digit.
    for name, tensor in final_tensors(uninterrupted(1)).items():
        assert final_tensors(folder)[name].allclose(tensor, rtol=0.2, atol=2e-2), name


@pytest.mark.slow
def test_twenty_random_kills_lose_nothing(tmp_path):
    config = make_config(train={"steps": 400, "eval_every": 50}, checkpoint={"every_steps": 2})
    whole = make_run(tmp_path / "whole", config)
    assert finish(start(whole))[0] == 0
    folder = make_run(tmp_path / "killed", config)
    generator = random.Random(0)
    kills, newest = 0, 0
    while kills < 20:
        process = start(folder)
        wait_for_step(folder, newest + 1)
        time.sleep(generator.uniform(0, 0.1))
        process.kill()
        finish(process)
        kills += 1
        newest = list_checkpoints(folder / "checkpoints")[-1][0]
        assert newest < 400, f"finished before kill {kills}: make the run longer"
    code, output = finish(start(folder))
    assert code == 0, output
    assert "damaged" not in output
    assert_same(folder, whole)
